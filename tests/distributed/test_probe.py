"""What the ranks measure between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspec_dist.distributed.collectives import CollectiveError, Collectives, SingleProcess
from fedspec_dist.processes import probe
from tests.distributed.harness import run_ranks


def _everything(collectives: Collectives) -> dict[str, Any]:
    rank = collectives.rank
    texts = probe.gather_texts(collectives, "ü" * 1000 * rank + str(rank))
    real, ahead = time.time, 100.0 * rank
    time.time = lambda: real() + ahead
    offsets = probe.clock_offsets_s(collectives)
    time.time = real
    speeds = probe.measure(collectives, "gloo", torch.device("cpu"), 100_000, timeout_s=30)
    honest = probe._all_gather
    probe._all_gather = lambda sent, group: (*honest(sent, group)[:2], 7.0 + rank)
    try:
        probe.measure(collectives, "gloo", torch.device("cpu"), 1000, timeout_s=30)
        wrong = ""
    except CollectiveError as error:
        wrong = str(error)
    return {"texts": texts, "offsets": offsets, "speeds": speeds, "wrong": wrong}


def test_texts_clocks_and_speeds_of_three_ranks(tmp_path: Path) -> None:
    for found in (results := run_ranks(_everything, 3, tmp_path)):
        assert found["texts"] == ["0", "ü" * 1000 + "1", "ü" * 2000 + "2"]
        assert found["offsets"] == pytest.approx([0, 100, 200], abs=1)
        assert [speed.name for speed in found["speeds"]] == ["all-to-all", "all-gather", "all-reduce"]
        assert all(0 < speed.latency_us < 1e6 and speed.megabytes_s > 0 for speed in found["speeds"])
        assert found["speeds"] == results[0]["speeds"], "all ranks say the same: that of the slowest"
        assert found["wrong"].endswith("gloo does not work between the ranks: wrong values arrive")


def test_one_rank_has_texts_and_a_clock_too() -> None:
    assert probe.gather_texts(SingleProcess(), "") == [""]
    assert probe.gather_texts(SingleProcess(), "a") == ["a"]
    assert probe.clock_offsets_s(SingleProcess()) == [0.0]
