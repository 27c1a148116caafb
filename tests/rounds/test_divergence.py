"""A run that failed is not a result: whole runs whose numbers leave the finite, and what they leave behind."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedspec_dist.config import load, methods
from fedspec_dist.processes import runtime
from fedspec_dist.processes.environment import Environment
from fedspec_dist.rounds.divergence import no_result, server_fault
from fedspec_dist.rounds.run import execute
from fedspec_dist.runs import events
from fedspec_dist.runs.folder import RunFolder
from launch.outcomes import read_outcome

TINY = [
    "data={dataset: synthetic, shape: [1, 4, 4], num_classes: 3, num_train: 60, num_test: 30}",
    "data.partition={type: iid, clients: 4}",
    "model={type: mlp, hidden: [8]}",
    "clients_per_round=2",
    "local.epochs=1",
    "local.batch_size=5",
    "rounds=3",
    "checkpoint.every=1",
    "filter=none",
]
SKIP = "runtime.on_nonfinite=skip"


@pytest.fixture(autouse=True)
def _no_records() -> Iterator[None]:
    """pytest would keep them, with them the errors, and with those the lock of the run's folder."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(folder: Path, *overrides: str, fresh: bool = False) -> tuple[int, RunFolder]:
    """The exit code and the run's folder."""
    config = load(None, [*TINY, f"output={folder}", *overrides])
    files = RunFolder(config.run_folder())
    told = events.Events(files.events, "start", 0, "here")
    console = Console(file=io.StringIO())
    code = runtime.run(
        config.runtime,
        Environment(),
        lambda job: execute(config, job, fresh, console, told),
        record=told.failure,
    )
    return code, files


def summary(files: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files.summary.read_text())
    return found


def last(files: RunFolder) -> events.Event:
    found = events.last_end(events.read(files.events))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("overrides", "reason", "skipped", "without"),
    [
        (["local.lr=1e20"], "nobody contributed to any of the 3 rounds: 6 updates were not finite", 6, 3),
        (["server.optimizer.lr=1e37"], "lower server.optimizer.lr, which is 1e+37", 4, 2),
        (["rounds=1", "server.optimizer.lr=1e37"], "lower server.optimizer.lr, which is 1e+37", 0, 0),
    ],
    ids=["nobody contributed", "the clients cannot train the model", "the last step"],
)
def test_a_run_that_did_all_its_rounds_for_nothing_has_diverged(
    overrides: list[str], reason: str, skipped: int, without: int, tmp_path: Path
) -> None:
    code, files = run(tmp_path, SKIP, *overrides)
    assert code == runtime.EXIT_DIVERGED == 3
    found = summary(files)
    assert found["status"] == "diverged"
    assert reason in found["reason"]
    assert (found["clients_skipped"], found["rounds_without_clients"]) == (skipped, without)
    assert (last(files).name, last(files).facts["origin"]) == (events.DIVERGED, "result")
    assert read_outcome(files.path).score("test_accuracy", 1) is None
    # The same again says so, does nothing, and ends in the same way; so it does without the skipping.
    before = files.metrics.read_bytes(), files.events.read_bytes()
    assert run(tmp_path, SKIP, *overrides)[0] == run(tmp_path, *overrides)[0] == 3
    assert (files.metrics.read_bytes(), files.events.read_bytes()) == before
    assert run(tmp_path, SKIP, *overrides, fresh=True)[0] == 3
    assert [event.name for event in events.read(files.events)] == [events.STARTED, events.DIVERGED]


@pytest.mark.parametrize(
    ("overrides", "origin", "round_number", "names", "not_names"),
    [
        (["local.lr=1e20"], "client", 1, ["client ", "local.lr", SKIP], "server.optimizer"),
        (["server.optimizer.lr=1e37"], "server", 2, ["server.optimizer.lr, which is 1e+37"], "local.lr"),
        (["server.optimizer.lr=1e38", "local.lr=10.0"], "server", 1, ["server.optimizer.lr"], "local.lr"),
    ],
    ids=["a client", "a model that no client can train", "a step that is not finite"],
)
def test_a_run_that_cannot_go_on_names_who_is_to_blame(
    overrides: list[str], origin: str, round_number: int, names: list[str], not_names: str, tmp_path: Path
) -> None:
    for _ in range(2):  # resumed, it knows nothing of the rounds before but their model
        code, files = run(tmp_path, *overrides)
        assert code == 3
        end = last(files)
        assert (end.name, end.facts["origin"], end.facts["round"]) == (events.DIVERGED, origin, round_number)
        assert all(name in end.message for name in names), end.message
        assert not_names not in end.message
        assert not files.summary.exists(), "with another runtime.on_nonfinite it may go on"
    assert read_outcome(files.path).state == "diverged"
    assert read_outcome(files.path, skips=True).complete == (origin != "client")


def test_a_run_that_is_let_go_on_goes_on(tmp_path: Path) -> None:
    assert run(tmp_path, "local.lr=1e20")[0] == 3
    code, files = run(tmp_path, "local.lr=1e20", SKIP)
    assert (code, summary(files)["clients_skipped"]) == (3, 6)


def test_an_ordinary_run_counts_nobody_and_is_a_result(tmp_path: Path) -> None:
    code, files = run(tmp_path)
    assert code == 0
    found = summary(files)
    assert (found["status"], found["clients_skipped"], found["rounds_without_clients"]) == ("finished", 0, 0)
    assert "reason" not in found
    assert [event.name for event in events.read(files.events)] == [events.STARTED, events.FINISHED]
    assert run(tmp_path)[0] == 0


def test_a_pixel_that_is_not_finite_is_a_failure_of_the_data_and_is_tried_again(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((60, 4, 4), dtype=np.float32)
    arrays = {"train_images": images, "test_images": images, "train_labels": np.arange(60) % 3}
    images[7, 1, 2] = np.nan
    np.savez(tmp_path / "d.npz", test_labels=arrays["train_labels"], **arrays)
    data = f"data={{dataset: npz, path: {tmp_path}/d.npz, root: {tmp_path}/cache}}"
    words = [data, "data.partition={type: iid, clients: 4}"]
    code, files = run(tmp_path / "runs", *words)
    assert code == 1
    assert (last(files).name, last(files).facts["kind"]) == (events.FAILED, "data")
    assert read_outcome(files.path).state == "failed"
    assert not read_outcome(files.path).complete
    images[7, 1, 2] = 0.5
    np.savez(tmp_path / "d.npz", test_labels=arrays["train_labels"], **arrays)
    assert run(tmp_path / "runs", *words)[0] == 0
    assert read_outcome(files.path).state == "finished"


def test_a_second_process_says_nothing_in_the_folder_of_the_first(tmp_path: Path) -> None:
    _, files = run(tmp_path)
    files.summary.unlink()
    other = RunFolder(files.path)
    other.open(fresh=False)
    before = files.events.read_bytes()
    assert run(tmp_path)[0] == 1
    assert files.events.read_bytes() == before
    other.close()


# ------------------------------------------------------------------------------------------ the rules alone

FINE = {"cohort": [1, 2], "train_loss": 1.0, "test_loss": 1.0}
MODEL = {"weight": torch.ones(2), "steps": torch.tensor(3)}


@pytest.mark.parametrize(
    ("records", "state", "expected"),
    [
        ([FINE], MODEL, ""),
        ([FINE | {"clients_skipped": 1}], MODEL, ""),
        ([FINE, FINE | {"clients_skipped": 2, "train_loss": None}], MODEL, ""),
        ([FINE | {"cohort": [], "train_loss": None}, FINE], MODEL, ""),
        (
            [FINE | {"clients_skipped": 2, "train_loss": None}],
            MODEL,
            "nobody contributed to any of the 1 rounds: 2",
        ),
        ([FINE | {"cohort": [], "train_loss": None}], MODEL, "nobody contributed to any of the 1 rounds: no sampled"),
        ([FINE, FINE | {"test_loss": None}], MODEL, "the loss or a metric of the final model on the test set"),
        ([FINE | {"test_loss": None}, FINE], MODEL, ""),
        ([FINE, FINE | {"train_loss": None}], MODEL, "the clients' loss in the last round is not finite"),
        ([FINE], MODEL | {"bias": torch.tensor([0.0, torch.nan])}, "the final model is not finite (bias)"),
        ([FINE], MODEL | {"bias": torch.tensor([torch.inf])}, "the final model is not finite (bias)"),
    ],
)
def test_what_is_no_result(records: list[Mapping[str, Any]], state: dict[str, torch.Tensor], expected: str) -> None:
    found = no_result(records, state, "")
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
    if expected:
        assert "Look there" in no_result(records, state, "look there")


@pytest.mark.parametrize(
    ("largest", "lr", "to_blame"),
    [
        (0.5, 1e38, False),
        (1e36, 1e38, True),
        (1e36, 1.0, False),
        (1e36, 2.0, False),
        (1e5, 1e4, True),
        (50, 1e4, False),
    ],
)
def test_a_server_is_to_blame_for_what_its_rate_made_large(largest: float, lr: float, to_blame: bool) -> None:
    (phase,) = load(None, [f"server.optimizer.lr={lr}"]).schedule()
    fault = server_fault(torch.tensor([0.1, -largest]), phase)
    assert bool(fault) == to_blame
    if to_blame:
        assert f"lower server.optimizer.lr, which is {lr:g}" in fault


class Plain:
    """A server optimizer of a user's own that has no learning rate."""

    def initial_state(self, num_columns: int) -> dict[str, torch.Tensor]:
        return {}

    def step(self, theta: torch.Tensor, direction: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return (theta + direction).to(theta.dtype)


def test_a_server_optimizer_without_a_learning_rate_ends_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.SERVER_OPTIMIZERS, "plain", methods.method(f"{__name__}:Plain"))
    code, files = run(tmp_path, "server.optimizer=plain")
    assert (code, summary(files)["status"]) == (0, "finished")
    assert run(tmp_path, "server.optimizer=plain", "local.lr=1e20")[0] == 3
