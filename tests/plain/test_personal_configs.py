"""The configs of personal parts, as they are in the repository, but on a few drawn images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedspec_dist.config import load
from fedspec_dist.core.parameters import matches
from fedspec_dist.rounds.checkpoint import load_newest
from tests.rounds.jobs import run_job

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "personal").glob("*.yaml"))
SMALL = (
    "data={dataset: synthetic, shape: [1, 8, 8], num_classes: 3, num_train: 90, num_test: 30}",
    "data.partition={type: pathological, clients: 5, classes_per_client: 2}",
    *("data.holdout=0.2", "model.width=2", "clients_per_round=2", "rounds=2", "runtime.device=cpu"),
)


def test_all_four_are_here() -> None:
    assert [path.stem for path in CONFIGS] == ["fedbn", "fedper", "fedrep", "lg_fedavg"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_personal_config_runs_and_keeps_what_it_does_not_share(path: Path, tmp_path: Path) -> None:
    config = load(path, [*SMALL, "checkpoint.every=1"])
    first = run_job(load(path, [*SMALL, "rounds=1"]), tmp_path / "first")
    after = run_job(config, tmp_path / "run")
    (phase,) = config.schedule()
    for name, value in after.model.items():
        if name.endswith(("weight", "bias")):
            kept = matches(name, phase.local.keep)
            assert matches(name, phase.server.shared) != kept, name
            # The global model's stay as they were; a norm takes out what the bias before it would learn.
            if kept or name.endswith("weight"):
                assert torch.equal(value, first.model[name]) == kept, name
        elif config.model.buffers == "local":
            assert torch.equal(value, first.model[name]), name
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert [row["client"] for row in rows] == list(range(5))
    assert after.records[-1]["client_accuracy_mean"] == pytest.approx(sum(row["accuracy"] for row in rows) / 5)
    saved = load_newest(tmp_path / "run" / "checkpoints", config.fingerprint())
    assert saved is not None
    keepers = {client for chunk in saved.clients for client in chunk}
    assert keepers == {client for record in after.records for client in record["cohort"]}
