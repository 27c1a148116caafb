"""What `--plan` says: memory as whole runs take it, and no more lines than can be read."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from torch import nn

from fedspec_dist.config import load
from fedspec_dist.data.dataset import Examples
from fedspec_dist.processes.environment import Environment
from fedspec_dist.rounds.memory import Activations
from fedspec_dist.rounds.plan import print_plan
from tests.rounds.jobs import tiny

MEASURE = """
import resource, sys
from fedspec_dist.main import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def planned(*overrides: str, config=None, num_ranks: int = 1) -> str:
    file = io.StringIO()
    environment = Environment(0, 1, 0, 1, launched=False)
    print_plan(config or load(None, overrides), environment, num_ranks, Console(file=file, width=250))
    return file.getvalue()


def held_bytes(text: str) -> list[float]:
    """Of the first round, by rank."""
    return [1e6 * float(megabytes) for megabytes in re.findall(r"MB . +([0-9.]+) MB", text)]


def test_a_large_cohort_is_counted_and_not_listed() -> None:
    overrides = [
        "data={dataset: synthetic, shape: [1, 4, 4], num_train: 9000, num_test: 10}",
        "model={type: mlp, hidden: []}",
    ]
    text = planned(*overrides, "data.partition={type: iid, clients: 3000}", "clients_per_round=3000")
    assert "(3000 in all)" in text
    assert max(map(len, text.splitlines())) <= 250
    assert len(text.splitlines()) < 40
    assert "square" not in text
    text = planned(
        *overrides, "data.partition={type: iid, clients: 3000}", "clients_per_round=3000", "server.aggregator=fedgh"
    )
    assert "fedgh compares all pairs of 3000 vectors" in text
    assert "72.00 MB" in text


def test_memory_grows_with_what_a_rank_has_to_hold() -> None:
    def held(*overrides: str, num_ranks: int = 1) -> float:
        return held_bytes(
            planned(config=tiny(["model={type: mlp, hidden: [900, 900]}", *overrides]), num_ranks=num_ranks)
        )[0]

    vector = 4 * (64 * 900 + 900 * 900 + 900 * 3)
    few, many = held("clients_per_round=1"), held("clients_per_round=5")
    assert many - few > 2 * 4 * vector  # rows, and blocks of columns
    assert held("clients_per_round=5", num_ranks=5) < many - 3 * vector
    assert held("local.algorithm=scaffold") > held("local.algorithm=fedavg") + 6 * vector  # what six clients keep
    assert held("server.optimizer=adam") > held("server.optimizer=sgd") + 4 * vector
    assert held("local.momentum=0.9") > held("local.momentum=0") + 0.9 * vector
    assert held("filter=lapd") > held("filter=none")
    assert held("server.aggregator={type: fipa, rank: 20}") > held() + 20 * vector
    base = "data={dataset: synthetic, shape: [1, 8, 8], num_classes: 3, num_train: %d, num_test: 30}"
    assert held(base % 40000) > held(base % 90) + 8e6, "the data set"


def test_activations_are_of_one_image_and_leave_the_model_alone() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 100), nn.ReLU(), nn.Linear(100, 10), nn.Dropout(0.5))
    images, before = Examples((torch.zeros(5000, 1, 4, 4),)), torch.get_rng_state()
    found = Activations.of(module.eval(), images)
    assert found.trained < 4 * (16 + 2 * 100 + 3 * 10) + 10
    assert found.trained >= 4 * (16 + 100)
    assert found.evaluated >= 4 * (100 + 100)
    assert torch.equal(torch.get_rng_state(), before)
    assert not module.training
    assert found == Activations.of(module, images.select(torch.arange(7))), "whatever the data set's size"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["model={type: mlp, hidden: [4000, 3000]}", "clients_per_round=2"],
        ["model={type: mlp, hidden: [4000, 3000]}", "clients_per_round=8", "filter=rfft", "server.optimizer=adam"],
        ["model={type: mlp, hidden: [2000, 2000]}", "local.algorithm=scaffold", "clients_per_round=20"],
    ],
)
def test_a_run_takes_about_the_memory_that_was_planned(overrides: list[str], tmp_path) -> None:
    settings = ["rounds=1", "local.steps=2", "filter=none", f"output={tmp_path}", *overrides]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *settings], capture_output=True, text=True, check=True, timeout=300
    )
    peak = float(re.findall(r"peak (\d+)", result.stdout)[0])
    assert held_bytes(planned(*settings))[0] == pytest.approx(peak, rel=0.2)
