"""Every task with every local method and every aggregator: it runs, or it is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS, LOCAL_ALGORITHMS, PARTITIONS, TASKS, method
from fedspec_dist.core.batch import Batch
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.tasks.base import Task
from tests.distributed.harness import run_ranks
from tests.rounds.jobs import run_job, tiny

RNG = np.random.default_rng(0)
OWNERS = np.arange(24) % 4
COMMON = [
    "data.partition={type: natural, clients: null}",
    *("clients_per_round=3", "rounds=1", "local.epochs=1", "local.batch_size=4", "local.lr=0.02"),
]


class Residual(Task):
    """`f'' = -2` at random points: the model is differentiated in its inputs."""

    headline = ("residual", "min")
    num_sums = 1

    def residuals(self, model, batch: Batch) -> Tensor:
        x = batch.inputs.detach().requires_grad_()
        with torch.enable_grad():
            (first,) = torch.autograd.grad(batch.__class__(x).through(model).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return second + 2

    def loss(self, model, batch: Batch) -> Tensor:
        return self.residuals(model, batch).square().mean()

    def metrics(self, model, batch: Batch) -> Tensor:
        return self.residuals(model, batch).detach().square().sum().double().reshape(1)

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        return {"residual": float(sums[0]) / num_samples}


OWN_TASK = method("tests.rounds.test_task_matrix:Residual")
PROBLEMS = {
    "regression": ("{type: mlp, hidden: [3]}", RNG.random((24, 2)), RNG.random((24, 2))),
    "language": (
        "{type: lstm_text, embedding: 2, hidden: 3, outputs: tokens}",
        RNG.integers(5, size=(24, 4)),
        RNG.integers(5, size=(24, 4)),
    ),
    "a residual": ("{type: mlp, hidden: [3], activation: tanh}", RNG.random((24, 1)).astype(np.float32), None),
}
# The key to change, and what goes instead.
REASON = re.compile(r"^(local\.algorithm|server\.aggregator): .*(allowed|derive it from)", re.DOTALL)


def settings(task: str, folder: Path) -> list[str]:
    model, inputs, targets = PROBLEMS[task]
    floats = inputs.dtype == np.float64
    arrays = {"inputs": inputs.astype(np.float32) if floats else inputs, "clients": OWNERS}
    if targets is not None:
        arrays["targets"] = targets.astype(np.float32) if floats else targets
    path = folder / f"{task.replace(' ', '_')}.npz"
    np.savez(path, **{f"{split}_{name}": array for split in ("train", "test") for name, array in arrays.items()})
    classes = 5 if task == "language" else "null"
    data = f"data={{dataset: npz, path: {path}, root: {folder}, num_classes: {classes}}}"
    return [data, *COMMON, f"model={model}", f"task={task if task in TASKS else 'residual'}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("problems")


@pytest.fixture(autouse=True)
def _own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "residual", OWN_TASK)


@pytest.mark.parametrize("local", LOCAL_ALGORITHMS)
@pytest.mark.parametrize("task", PROBLEMS)
def test_a_combination_runs_or_is_refused_with_the_reason(task: str, local: str, folder: Path, tmp_path: Path) -> None:
    ran = []
    for aggregator in AGGREGATORS:
        choices = {"local.algorithm": local, "server.aggregator": aggregator}
        if local == "fednova":
            choices["server.aggregator"] = "fednova"
        if aggregator == "fipa" and local != "fednova":
            choices["server.aggregator"] = "{type: fipa, rank: 2, oversampling: 1}"
        overrides = [*settings(task, folder), *(f"{key}={name}" for key, name in choices.items())]
        refusal = ""
        try:
            last = run_job(tiny(overrides), tmp_path / f"{local}-{aggregator}").records[-1]
        except ValueError as error:  # a ConfigError is one
            refusal = str(error)
        assert refusal == "" or REASON.match(refusal), refusal
        if not refusal:
            assert np.isfinite(last["train_loss"])
            ran.append(aggregator)
    refused_at_all = {"fedlc", "fedrcl"} | ({"moon", "feddecorr"} if task != "regression" else set())
    expected = {*AGGREGATORS} if local not in refused_at_all else set()
    if local != "fednova":  # whose aggregator is its other half
        expected -= {"inco"} | ({"fednova"} if local in ("feddyn", "feddc") else set())
        expected -= {"fipa", "fisher_diagonal"} if task != "regression" else set()
    assert set(ran) == expected


# Those that cut by groups of samples; the others know how many samples there are, or whose.
BY_GROUPS = {"shards", "pathological", "dirichlet", "dirichlet_uncapped", "dirichlet_balanced"}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_real_targets_are_cut_by_bins_or_not_at_all(partition: str, folder: Path) -> None:
    options = {"natural": ", clients: null", "dirichlet": ", clients: 3, min_size: 1, alpha: 5.0"}
    cut = f"data.partition={{type: {partition}{options.get(partition, ', clients: 3')}}}"
    overrides = [*settings("regression", folder), cut, "clients_per_round=1"]
    if partition in BY_GROUPS:
        with pytest.raises(ValueError, match=r"^data\.partition: this one cuts by classes .*, or data\.bins, which"):
            load_federation(tiny(overrides), prepares=True)
    else:
        assert load_federation(tiny(overrides), prepares=True).dataset.train.groups is None
    federation = load_federation(tiny([*overrides, "data.bins=4"]), prepares=True)
    groups = federation.dataset.train.groups
    assert groups is not None
    assert np.bincount(groups.numpy()).tolist() == [6, 6, 6, 6]
    assert federation.dataset.num_groups == 4
    assert sum(len(samples) for samples in federation.clients) == 24


# What the tasks' curvature, groups and clients' own samples bring in.
MORE = {
    "regression": ["server.aggregator={type: fipa, rank: 2, oversampling: 1}", "data.bins=3", "data.holdout=0.3"],
    "language": ["local.algorithm=scaffold", "eval.on=[global, clients]"],
    "a residual": ["local.algorithm=feddyn", "server.aggregator=fedgh", "eval.on=[global, clients]"],
}


def _runs(
    collectives: Collectives, folder: Path, jobs: list[list[str]]
) -> list[tuple[dict[str, bytes], list[dict[str, Any]]]]:
    TASKS.setdefault("residual", OWN_TASK)  # for a process of its own
    finished = []
    for number, overrides in enumerate(jobs):
        run = run_job(tiny(overrides), folder / f"{collectives.num_ranks}-{number}", collectives)
        finished.append(({name: value.numpy().tobytes() for name, value in run.model.items()}, run.results()))
    return finished


@pytest.mark.slow
def test_every_task_has_the_same_bits_at_any_number_of_ranks(folder: Path) -> None:
    jobs = [[*settings(task, folder), *more, "rounds=2", "eval.batch_size=5"] for task, more in MORE.items()]
    alone = _runs(SingleProcess(), folder, jobs)
    for num_ranks in (2, 3):
        for of_rank in run_ranks(_runs, num_ranks, folder, folder, jobs):
            assert of_rank == alone
