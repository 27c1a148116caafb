"""Ranks of one start of a job agree on a name, whatever earlier starts left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fedspec_dist.distributed.rendezvous import part_of, this_start


def _names(store: Any, ranks: list[int], num_ranks: int, timeout_s: float = 5) -> list[str]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: this_start(store, rank, num_ranks, timeout_s), ranks))


def test_every_start_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [_names(store, [0, 1, 2], 3) for _ in range(5)]
    assert all(len(set(of_one_start)) == 1 for of_one_start in names)
    assert len({of_one_start[0] for of_one_start in names}) == 5


def test_ranks_of_a_start_that_never_came_together_do_not_disturb_the_next() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="rank 0 did not come"):
        this_start(store, 1, 3, 0.05)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come within"):
        this_start(store, 0, 3, 0.05)
    assert len(set(_names(store, [2, 1, 0], 3))) == 1


def test_parts_of_a_store_do_not_see_each_other() -> None:
    store = dist.TCPStore("localhost", 0, world_size=1, is_master=True, wait_for_workers=False)
    first, second = part_of(store, "first", "watch"), part_of(store, "second", "watch")
    first.set("failure", "x")
    assert part_of(store, "first", "watch").check(["failure"])
    assert not second.check(["failure"])


def test_one_rank_needs_nobody() -> None:
    assert this_start(dist.HashStore(), 0, 1, 0)
