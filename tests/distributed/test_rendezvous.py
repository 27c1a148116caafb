"""Ranks of one start of a job agree on a name, whatever earlier starts left in the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fedspec_dist.processes.environment import Environment
from fedspec_dist.processes.rendezvous import part_of, this_start


def _start(store: Any, rank: int, num_ranks: int, timeout_s: float = 5, launcher: str = "", group: int = 0) -> str:
    environment = Environment(rank, num_ranks, launched=True, launcher=launcher, group=group)
    return this_start(store, environment, time.monotonic() + timeout_s)


def _names(store: Any, ranks: list[int], num_ranks: int) -> list[str]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: _start(store, rank, num_ranks), ranks))


def test_every_start_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [_names(store, [0, 1, 2], 3) for _ in range(5)]
    assert all(len(set(of_one_start)) == 1 for of_one_start in names)
    assert len({of_one_start[0] for of_one_start in names}) == 5


def test_ranks_of_a_start_that_never_came_together_do_not_disturb_the_next() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="rank 0 did not come"):
        _start(store, 1, 3, 0.05)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come within"):
        _start(store, 0, 3, 0.05)
    assert len(set(_names(store, [2, 1, 0], 3))) == 1


def test_parts_of_a_store_do_not_see_each_other() -> None:
    store = dist.TCPStore("localhost", 0, world_size=1, is_master=True, wait_for_workers=False)
    first, second = part_of(store, "first", "watch"), part_of(store, "second", "watch")
    first.set("failure", "x")
    assert part_of(store, "first", "watch").check(["failure"])
    assert not second.check(["failure"])


def test_one_rank_needs_nobody() -> None:
    assert _start(dist.HashStore(), 0, 1, 0)


@pytest.mark.parametrize("orphan", [0, 1, 2])
def test_an_orphan_of_a_killed_launcher_is_not_taken_for_a_rank_of_the_next(orphan: int) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        stray = pool.submit(_start, store, orphan, 3, 1.5, "the launcher that was killed")
        time.sleep(0.1)
        ours = [pool.submit(_start, store, rank, 3, 5, "the one that runs") for rank in range(3)]
        assert len({future.result() for future in ours}) == 1
        with pytest.raises(RuntimeError, match="did not come"):
            stray.result()


def test_several_launchers_on_one_host_may_be_one_job() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ours = [pool.submit(_start, store, rank, 2, 5, f"launcher {rank}", group=rank) for rank in range(2)]
        assert len({future.result() for future in ours}) == 1
