"""The batched executor against the sequential one: whole runs on a tiny problem."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspec_dist.config.methods import FILTERS
from tests.rounds.jobs import run_job, tiny

TOLERANCE = 1e-6

CASES = [
    *([f"filter={name}"] for name in sorted(FILTERS)),
    *(
        [f"local.algorithm={name}"]
        for name in ["fedavg", "fedcm", "feddc", "feddyn", "fedlc", "fedprox", "fedsam", "mofedsam", "scaffold"]
    ),
    ["local.momentum=0.9", "local.weight_decay=0.01", "local.clip_norm=0.5"],
    # A large epsilon: Adam divides noise of 1e-9 by itself where a gradient is zero.
    ["local.optimizer={type: adamw, epsilon: 0.001}", "local.weight_decay=0.01"],
    # Clients of other sizes come to the second part of the schedule in other steps.
    ["local.schedule=[{epochs: 1, train: ['*']}, {epochs: 1, train: ['*weight']}]"],
]


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: ",".join(settings)[:60])
def test_the_model_is_that_of_one_client_after_the_other(settings: list[str], tmp_path: Path) -> None:
    sequential, batched = (
        run_job(tiny([*settings, f"runtime.executor={name}", f"output={tmp_path / name}"]), tmp_path / name).model
        for name in ("sequential", "batched")
    )
    for name, expected in sequential.items():
        torch.testing.assert_close(batched[name], expected, rtol=0, atol=TOLERANCE)
