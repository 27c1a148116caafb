"""A helper that could swallow a failure would make every test that uses it worthless."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fedspec_dist.distributed.collectives import Collectives
from tests.distributed.harness import RankError, run_ranks


def _sum_of_ranks(collectives: Collectives) -> float:
    return float(collectives.all_gather(torch.tensor([float(collectives.rank)]), "test").sum())


def _raises_on_one(collectives: Collectives) -> None:
    assert collectives.rank != 1, "as planned"


def _dies_on_one(collectives: Collectives) -> None:
    if collectives.rank == 1:
        os._exit(7)


def _hangs_on_one(collectives: Collectives) -> None:
    if collectives.rank == 1:
        time.sleep(60)


def test_results_come_by_rank(tmp_path: Path) -> None:
    assert run_ranks(_sum_of_ranks, 3, tmp_path) == [3.0, 3.0, 3.0]


def test_an_assertion_on_one_rank_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised:(.|\n)*as planned"):
        run_ranks(_raises_on_one, 2, tmp_path)


def test_a_death_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(_dies_on_one, 2, tmp_path)


def test_a_hang_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] still running"):
        run_ranks(_hangs_on_one, 2, tmp_path, timeout_s=8)
