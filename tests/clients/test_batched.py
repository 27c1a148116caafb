"""The batched executor against the sequential one: whole runs on tiny problems; what it refuses, with the reason."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.executors.base import ClientWork
from fedspec_dist.clients.executors.groups import PaddedSteps, groups
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.config.methods import FILTERS, LOCAL_ALGORITHMS, TASKS, method
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.tasks.base import Task
from fedspec_dist.tasks.regression import Regression
from tests.distributed.harness import run_ranks
from tests.rounds.jobs import Finished, run_job, tiny

TOLERANCE = 1e-6
HERE = "tests.clients.test_batched"
PLUGIN = "tests.clients.noisy_method"
ON_FEATURES = ["moon", "feddecorr", "fedrcl"]

CASES = {
    **{f"filter {name}": [f"filter={name}"] for name in FILTERS},
    **{
        f"local {name}": [f"local.algorithm={name}", "rounds=3", *["server.aggregator=fednova"] * (name == "fednova")]
        for name in LOCAL_ALGORITHMS
        if name not in ON_FEATURES
    },
    "FedLC where clients lack classes": [
        "local.algorithm=fedlc",
        "data.partition={type: shards, clients: 6, shards_per_client: 1}",
    ],
    "momentum": ["local.momentum=0.9", "local.weight_decay=0.01", "local.clip_norm=0.5", "local.algorithm=scaffold"],
    "convolutions": ["model={type: cnn, width: 2}", "filter=rfft", "local.algorithm=scaffold"],
    # A large epsilon: Adam divides noise of 1e-9 by itself where a gradient is zero.
    "AdamW": ["local.optimizer={type: adamw, epsilon: 0.001}", "local.weight_decay=0.01"],
    # Clients of other sizes come to the second part of the schedule in other steps.
    "schedule": [
        "local.schedule=[{epochs: 1, train: ['*']}, {epochs: 1, train: ['fc.*']}]",
        *("local.momentum=0.9", "local.weight_decay=0.1"),
    ],
    "trainable": ["trainable=['fc.*']"],
    "steps": ["local.steps={min: 1, max: 4}", "local.drop_last=true"],
    "epochs": ["local.epochs={min: 1, max: 3}"],
    "norm over the batch, held": ["model={type: cnn, width: 2, norm: batch, buffers: freeze}"],
    "augmentation": ["data.augment=[{type: crop, padding: 1}, flip]"],
    "float64": ["runtime.dtype=float64"],
    "groups of one": ["runtime.clients_per_batch=1"],
    "one group": ["runtime.clients_per_batch=100"],
    "sketches": ["server.aggregator={type: fipa, rank: 3}"],
    "draws in a loss": ["local.algorithm=noisy"],
}


class DrawsInAStep(LocalAlgorithm):
    def begin(self, vectors: LocalVectors, client: Client) -> None:
        vectors.constant.copy_(torch.randn(vectors.constant.shape, generator=client.generator()))


class Twice(LocalAlgorithm):
    def loss(self, model, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        return client.loss(model, inputs, labels) + client.loss(model, inputs + 0.1, labels)


class Asks(LocalAlgorithm):
    def loss(self, model, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        return client.loss(model, inputs, labels) + sum(part.square().sum() for part in model.parameters())


@pytest.fixture(autouse=True)
def _own_methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gone afterwards: other tests walk through all methods that there are."""
    own = {"draws": f"{HERE}:DrawsInAStep", "twice": f"{HERE}:Twice", "asks": f"{HERE}:Asks"}
    for name, target in {"noisy": f"{PLUGIN}:Noisy", **own}.items():
        monkeypatch.setitem(LOCAL_ALGORITHMS, name, method(target))
    yield
    LOCAL_ALGORITHMS.pop("noisy_scaffold", None)
    sys.modules.pop(PLUGIN, None)


def run(settings: list[str], executor: str, folder: Path) -> Finished:
    size = [] if any("clients_per_batch" in each for each in settings) else ["runtime.clients_per_batch=2"]
    model = [] if any(each.startswith("model=") for each in settings) else ["model={type: mlp, hidden: [4]}"]
    config = tiny([*settings, *model, f"runtime.executor={executor}", *(size if executor == "batched" else [])])
    return run_job(config, folder / executor)


def require_alike(settings: list[str], folder: Path) -> None:
    sequential, batched = (run(settings, executor, folder) for executor in ("sequential", "batched"))
    for name, expected in sequential.model.items():
        torch.testing.assert_close(batched.model[name], expected, rtol=0, atol=TOLERANCE)
    for ours, theirs in zip(batched.records, sequential.records, strict=True):
        for key in {"train_loss", "filter/energy_removed", "test_loss"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_that_of_one_client_after_the_other(case: str, tmp_path: Path) -> None:
    settings = CASES[case]
    if "clients_per_batch" in str(settings):
        settings = [*settings, "local.algorithm=scaffold"]
    require_alike(settings, tmp_path)


MODELS = {
    "transformer": "{type: transformer_text, width: 4, depth: 1, heads: 2, outputs: tokens}",
    "mlp": "{type: mlp, hidden: [3]}",
}


@pytest.mark.parametrize("task", ["regression", "language", "classification"])
def test_other_tasks_and_tensors(task: str, tmp_path: Path) -> None:
    rng, owners = np.random.default_rng(0), np.arange(24) % 5  # clients of four and of five samples
    inputs = rng.random((24, 3), dtype=np.float32)
    targets = rng.random((24, 2), dtype=np.float32)
    if task == "language":
        inputs, targets = rng.integers(5, size=(24, 4)), rng.integers(5, size=(24, 4))
        targets[rng.random((24, 4)) < 0.4] = -100  # so that a batch's samples count differently
        targets[owners == 1] = -100  # of one client, nothing counts
    elif task == "classification":
        targets = rng.integers(3, size=24)
    arrays = {"inputs": inputs, "targets": targets, "clients": owners}
    path = tmp_path / "x.npz"
    np.savez(path, **{f"{split}_{name}": array for split in ("train", "test") for name, array in arrays.items()})
    classes = {"regression": "null", "language": 5, "classification": 3}[task]
    data = f"data={{dataset: npz, path: {path}, root: {tmp_path}, num_classes: {classes}}}"
    model = MODELS["transformer" if task == "language" else "mlp"]
    require_alike(
        [
            data,
            "data.partition={type: natural, clients: null}",
            f"model={model}",
            f"task={task}",
            "local.lr=0.1",
            "runtime.dtype=float64",
        ],
        tmp_path,
    )


class Huber(Regression):
    """A task without `terms`."""

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs, targets, delta=0.1)

    terms = Task.terms


class Fractions(Regression):
    """The loss of a sample counts as its first target says, which may be a little."""

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return targets[:, 0] * (outputs - targets).square().sum(1), targets[:, 0]

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        sums, weights = self.terms(outputs, targets)
        return sums.sum() / weights.sum()


@pytest.mark.parametrize("kind", [Huber, Fractions])
def test_tasks_of_ones_own(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "mine", method(f"{HERE}:{kind.__name__}", headline=("mse", "min")))
    rng = np.random.default_rng(0)
    arrays = {"inputs": rng.random((24, 3)), "targets": rng.random((24, 2)) / 100, "clients": np.arange(24) % 5}
    np.savez(tmp_path / "x.npz", **{f"{part}_{name}": a for part in ("train", "test") for name, a in arrays.items()})
    data = f"data={{dataset: npz, path: {tmp_path / 'x.npz'}, root: {tmp_path}, num_classes: null}}"
    settings = [data, "data.partition={type: natural, clients: null}", "task=mine", "runtime.dtype=float64"]
    require_alike(settings, tmp_path)


SPOILED = 11  # a training image, whose client then has nothing finite to send


def _batched(collectives: Collectives, folder: str, until: int | None = None) -> Finished:
    """Groups of four of six clients, one with nothing finite, and draws in a loss."""
    settings = ["clients_per_round=6", "runtime.executor=batched", "runtime.clients_per_batch=4", "checkpoint.every=1"]
    settings += [f"plugins=[{PLUGIN}]", "local.algorithm=noisy_scaffold", "runtime.on_nonfinite=skip"]
    config = tiny([*settings, "model={type: mlp, hidden: [4]}"])
    return run_job(config, Path(folder), collectives, until, spoil={SPOILED: float("inf")})


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_bits_at_any_number_of_ranks_and_after_a_stop(num_ranks: int, tmp_path: Path) -> None:
    """With a short last group, and with a rank that has none."""
    (alone,) = run_ranks(_batched, 1, tmp_path, str(tmp_path / "1"))
    assert [record["clients_skipped"] for record in alone.records] == [1, 1]
    run_ranks(_batched, 1, tmp_path, str(tmp_path / "2"), 1)
    for found in run_ranks(_batched, num_ranks, tmp_path, str(tmp_path / "2")):
        assert all(torch.equal(found.model[name], expected) for name, expected in alone.model.items())


class Plain(nn.Module):
    def __init__(self, num_outputs: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(64, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


class FunctionalDropout(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(images, 0.5, self.training))


class PythonDraws(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images * random.random())


class Centred(Plain):
    """A norm over the batch without memory."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - images.mean(0))


class Padded(Plain):
    def __init__(self, num_outputs: int = 3) -> None:
        super().__init__(num_outputs)
        self.embedding = nn.Embedding(4, 3, padding_idx=0)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.embedding((images.flatten(1) > 0).long()).sum(1)


class Branches(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.sum() > 0 else -images)


REFUSED = {
    "batch norm": (["model={type: resnet20, norm: batch}"], "batch norm"),
    "dropout": (
        ["model={type: vit_small, patch: 4, width: 4, depth: 1, heads: 2, dropout: 0.5}"],
        "draws random numbers .* model.dropout=0",
    ),
    "functional dropout": ([f"model={{type: module, path: '{HERE}:FunctionalDropout'}}"], "draws random numbers"),
    "draws of python": ([f"model={{type: module, path: '{HERE}:PythonDraws'}}"], "differ from call to call"),
    "norm over the batch": ([f"model={{type: module, path: '{HERE}:Centred'}}"], "others of its batch"),
    "padding": ([f"model={{type: module, path: '{HERE}:Padded'}}"], "padding_idx"),
    "branches": ([f"model={{type: module, path: '{HERE}:Branches'}}"], "several clients at once"),
    **{name: ([f"local.algorithm={name}"], "acts on the model's features") for name in ON_FEATURES},
    "full gradients": (["local.algorithm={type: scaffold, option: 1}"], "gradient over all samples"),
    "personal parts": (["server.shared=['features.*']", "local.keep=['fc.*']"], "share all of it"),
    "draws in a step": (["local.algorithm=draws"], "draws of one client"),
    "other inputs": (["local.algorithm=twice"], "other than its batch"),
    "parts of the model": (["local.algorithm=asks"], "asks the model for 'parameters'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_batched_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^runtime\.executor: got 'batched', but .*{reason}.*sequential$"):
        run(settings, "batched", tmp_path)


def test_what_is_refused_runs_one_after_the_other(tmp_path: Path) -> None:
    """Else the refusals above could be of something that never runs."""
    for number, (settings, _) in enumerate(REFUSED.values()):
        assert run([*settings, "rounds=1"], "sequential", tmp_path / str(number)).records


def work(client: int, bounds: list[tuple[int, int]], num_samples: int) -> ClientWork:
    order = torch.arange(100 * client, 100 * client + 50)
    return ClientWork(client, order[:num_samples], order, bounds, None, torch.ones(2, dtype=torch.int64), 0)


def test_batches_are_padded_to_few_sizes_with_a_sample_of_the_client() -> None:
    planned = PaddedSteps.of([work(1, [(0, 5), (5, 7)], 6), work(2, [(0, 4), (5, 8), (8, 9)], 9)])
    assert planned.bounds == [(0, 5), (5, 9), (9, 10)]
    assert planned.order.tolist() == [
        [100, 101, 102, 103, 104, 105, 106, 100, 100, 100],
        [200, 201, 202, 203, 200, 205, 206, 207, 200, 208],
    ]
    assert [[place for place, pad in enumerate(row) if pad] for row in planned.padding.tolist()] == [[7, 8, 9], [4, 8]]
    assert planned.counts.tolist() == [[5, 2, 0], [4, 3, 1]]
    assert planned.num_steps.tolist() == [[2], [3]]
    assert planned.fewest == 2


def test_groups_are_of_a_fixed_number_in_order() -> None:
    assert groups(5, 2) == [[0, 1], [2, 3], [4]]
    assert groups(0, 2) == []
