"""The product is a plain PyTorch loop: networks with state, sequences, tables, Adam, parts that clients keep."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedspec_dist.distributed.collectives import Collectives
from tests.distributed.harness import run_ranks
from tests.plain.loop import PlainFederation
from tests.plain.nets import BatchNormNet, Lstm, Mlp, ResNet18
from tests.rounds.jobs import Finished, run_job, tiny

RNG = np.random.default_rng(1)
# Four clients; one has a single sample, and another leaves one over in each epoch.
OWNERS = np.repeat([0, 1, 2, 3], [6, 9, 1, 8])
NUM = len(OWNERS)
HERE = "tests.plain.nets"

Arrays = tuple[np.ndarray, np.ndarray]


def _language_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _images(size: int = 6) -> Arrays:
    """Of a ResNet-18 not below 16: batch norm over one place of two samples lets rounding errors grow to order 1."""
    return RNG.standard_normal((NUM, 1, size, size)), RNG.integers(3, size=NUM)


def _table() -> Arrays:
    x = RNG.standard_normal((NUM, 3))
    return x, x @ RNG.standard_normal((3, 2)) + 1


def _tokens() -> Arrays:
    tokens = RNG.integers(7, size=(NUM, 5))
    targets = np.roll(tokens, -1, axis=1)
    targets[:, -1] = -100
    return tokens, targets


def _standardised(raw: Arrays) -> Arrays:
    """A table as the product should read it, by hand."""
    x, y = raw
    return tuple(part.astype(np.float32).astype(np.float64) for part in ((x - x.mean(0)) / x.std(0), y))


_SGD = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)


@dataclass(frozen=True)
class Case:
    net: nn.Module
    model: str
    data: Arrays
    settings: Sequence[str] = ()
    plain: dict[str, Any] = field(default_factory=dict)
    loss: Any = cross_entropy
    optimizer: Any = _SGD
    metric: str = "loss"  # what the product calls the mean of `loss`
    raw: Arrays | None = None  # the data as they stand in a csv, if it is one
    dtype: torch.dtype = torch.float64
    rounds: int = 3


def _case(kind: str, settings: Sequence[str] = (), **changes: Any) -> Case:
    torch.manual_seed(0)
    raw = (RNG.standard_normal((NUM, 3)) * 4 + 2, RNG.standard_normal((NUM, 1)))
    net, data, more, others = {
        "norms": (BatchNormNet(), _images(), [], {}),
        "resnet": (ResNet18(), _images(16), [], {}),
        "table": (Mlp((3,), 2), _table(), ["task=regression"], {"loss": mse_loss, "metric": "mse"}),
        "csv": (
            Mlp((3,), 1),
            _standardised(raw),
            ["task=regression"],
            {"loss": mse_loss, "metric": "mse", "raw": raw},
        ),
        "tokens": (
            Lstm(7, 7),
            _tokens(),
            ["task=language", "data.num_classes=7", "model.arguments={vocabulary_size: 7}"],
            {"loss": _language_loss},
        ),
    }[kind]
    model = f"{{type: module, path: '{HERE}:{type(net).__name__}'}}"
    return Case(net, model, data, [*more, *settings], **{**others, **changes})


def _fedrep(setting: str, optimizer: Any) -> Case:
    return _case(
        "table",
        [
            *("server.shared=['body.*']", "local.keep=['head.*']", setting),
            "local.schedule=[{epochs: 2, train: ['head.*']}, {epochs: 1, train: ['body.*']}]",
        ],
        plain={"shared": ("body.*",), "keep": HEAD, "schedule": ((2, HEAD), (1, ("body.*",)))},
        optimizer=optimizer,
    )


_MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
_ADAM = partial(torch.optim.Adam, lr=0.1, weight_decay=0.01)
_ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01)
HEAD, NORMS = ("head.*",), ("norm.*",)
BODY = ("conv.*", "norm.*")
MODES = ("aggregate", "local", "freeze")
CASES = {
    **{f"batch norm, {mode}": _case("norms", [f"model.buffers={mode}"], plain={"buffers": mode}) for mode in MODES},
    **{f"resnet-18, {mode}": _case("resnet", [f"model.buffers={mode}"], plain={"buffers": mode}) for mode in MODES},
    "float32": _case("norms", ["runtime.dtype=float32"], dtype=torch.float32),
    "an lstm on tokens": _case("tokens"),
    "a csv": _case("csv"),
    "validation samples": _case("table", ["data.holdout=0.3"], plain={"holdout": 0.3}),
    "last batches dropped": _case("norms", ["local.drop_last=true"], plain={"drop_last": True}),
    "last batches kept": _case("table", ["local.drop_last=false"], plain={"drop_last": False}),
    "momentum": _case("table", ["local.momentum=0.9"], optimizer=_MOMENTUM),
    "adam": _case("table", ["local.optimizer=adam"], optimizer=_ADAM),
    "adamw": _case("table", ["local.optimizer=adamw"], optimizer=_ADAMW),
    "batched": _case("csv", ["runtime.executor=batched"]),
    "batched, adam": _case("table", ["runtime.executor=batched", "local.optimizer=adam"], optimizer=_ADAM),
    "fedper": _case(
        "norms", ["server.shared=['conv.*', 'norm.*']", "local.keep=['head.*']"], plain={"shared": BODY, "keep": HEAD}
    ),
    "fedbn": _case(
        "norms",
        ["server.shared=['conv.*', 'head.*']", "local.keep=['norm.*']", "model.buffers=local"],
        plain={"shared": ("conv.*", "head.*"), "keep": NORMS, "buffers": "local"},
    ),
    "lg-fedavg": _case(
        "norms", ["server.shared=['head.*']", f"local.keep={list(BODY)}"], plain={"shared": HEAD, "keep": BODY}
    ),
    "a head that is dropped": _case("norms", ["server.shared=['conv.*', 'norm.*']"], plain={"shared": BODY}),
    "fedrep": _fedrep("local.momentum=0.9", _MOMENTUM),
    # Each part counts the steps that it has made itself.
    "fedrep with adam": _fedrep("local.optimizer=adam", _ADAM),
    "fedrep with adamw": _fedrep("local.optimizer=adamw", _ADAMW),
}


# What is left out here differs from one of these in nothing that ranks share.
ON_RANKS = {name: case for name, case in CASES.items() if not name.startswith(("batch norm", "last", "momentum"))}


def _write(folder: Path, case: Case) -> None:
    """The data, of which the test set is the training set backwards, and the initial weights."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = case.raw or case.data
    if case.raw:
        for split, order in (("train", slice(None)), ("test", slice(None, None, -1))):
            rows = [
                [*features, f"u{owner}", target]
                for features, owner, target in zip(x.tolist(), OWNERS, y[:, 0].tolist(), strict=True)
            ]
            with (folder / f"{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([["a", "b", "c", "who", "y"], *rows[order]])
    else:
        arrays = {"inputs": x, "targets": y, "clients": OWNERS}
        tests = {f"test_{name}": array[::-1] for name, array in arrays.items()}
        if "holdout" in case.plain:  # clients have no test samples then
            del tests["test_clients"]
        np.savez(folder / "d.npz", **{f"train_{name}": array for name, array in arrays.items()}, **tests)
    save_file({name: tensor.clone() for name, tensor in case.net.state_dict().items()}, folder / "w.safetensors")


def _settings(folder: Path, case: Case) -> list[str]:
    """With which the product takes them."""
    source = f"dataset: npz, path: {folder}/d.npz"
    if case.raw:
        source = f"dataset: csv, train: {folder}/train.csv, test: {folder}/test.csv, target: y, client: who"
    return [
        f"data={{{source}, root: {folder}}}",
        *([] if case.raw else ["data.num_classes=null"]),
        "data.partition={type: natural, clients: null}",
        f"model={case.model}",
        f"init={{weights: {folder}/w.safetensors}}",
        *(
            "clients_per_round=2",
            f"rounds={case.rounds}",
            "local.lr=0.1",
            "local.weight_decay=0.01",
            "local.batch_size=4",
        ),
        *("runtime.dtype=float64", "eval={every: 1, on: [global, clients]}"),
        *([] if any("schedule" in text for text in case.settings) else ["local.epochs=2"]),
        *case.settings,
    ]


@dataclass(frozen=True)
class Expected:
    model: dict[str, Tensor]
    test: list[float]  # of each round, the global model's loss
    clients: list[dict[int, float]]  # of each round, the loss of each client's model


def _plain(case: Case) -> Expected:
    x, y = (torch.from_numpy(part) for part in case.data)
    x, y = (part.to(case.dtype) if part.is_floating_point() else part for part in (x, y))
    back = x.flip(0), y.flip(0)
    net = copy.deepcopy(case.net).to(case.dtype)
    tests = None if "holdout" in case.plain else (*back, OWNERS[::-1])
    federation = PlainFederation(net, x, y, OWNERS, tests, case.loss, case.optimizer, **case.plain)
    test, clients = [], []
    for index in range(case.rounds):
        federation.round(index)
        test.append(float(case.loss(net.eval()(back[0]), back[1]).detach()))
        clients.append(federation.evaluated())
    return Expected(net.state_dict(), test, clients)


def _require_equal(case: Case, found: Finished, lines: str) -> None:
    """The model, its loss, and each client's, after every round."""
    expected, near = _plain(case), 1e-10 if case.dtype is torch.float64 else 1e-5
    assert found.model.keys() == expected.model.keys()
    for key, value in expected.model.items():
        if "num_batches" not in key:
            torch.testing.assert_close(found.model[key], value, rtol=near, atol=near)
    assert [r[f"test_{case.metric}"] for r in found.records] == pytest.approx(expected.test, rel=10 * near)
    rows = [json.loads(line) for line in lines.splitlines()]
    for number, (record, clients) in enumerate(zip(found.records, expected.clients, strict=True), start=1):
        each = {row["client"]: row[case.metric] for row in rows if row["round"] == number}
        assert each == pytest.approx(clients, rel=10 * near)
        values = list(clients.values())
        assert record[f"client_{case.metric}_mean"] == pytest.approx(np.mean(values), rel=10 * near)
        assert record[f"client_{case.metric}_std"] == pytest.approx(np.std(values), rel=1e-3 if near > 1e-6 else 1e-8)
    assert len(rows) == sum(map(len, expected.clients))


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_the_plain_loop(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _write(tmp_path, case)
    found = run_job(tiny(_settings(tmp_path, case)), tmp_path / "run")
    _require_equal(case, found, (tmp_path / "run" / "clients.jsonl").read_text())


def _place(folder: Path | str, name: str) -> Path:
    return Path(folder) / name.replace(" ", "_").replace(",", "")


def _stopped(collectives: Collectives, folder: str) -> dict[str, dict[str, Tensor]]:
    """Of each case the model after a stop in between, on these ranks."""
    found = {}
    for name, case in ON_RANKS.items():
        path = _place(folder, name)
        config, run = tiny(_settings(path, case)), path / f"on-{collectives.num_ranks}"
        run_job(config, run, collectives, rounds=2)
        found[name] = run_job(config, run, collectives).model
    return found


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_any_number_of_ranks_and_a_stop_give_the_same_bits(tmp_path: Path) -> None:
    alone, lines = {}, {}
    for name, case in ON_RANKS.items():
        path = _place(tmp_path, name)
        _write(path, case)
        alone[name] = run_job(tiny(_settings(path, case)), path / "alone").model
        lines[name] = (path / "alone" / "clients.jsonl").read_text()
    for num_ranks in (1, 2, 3):
        for found in run_ranks(_stopped, num_ranks, tmp_path, str(tmp_path), timeout_s=300):
            assert [name for name in ON_RANKS if not _same(found[name], alone[name])] == []
        runs = {name: _place(tmp_path, name) / f"on-{num_ranks}" for name in ON_RANKS}
        assert [name for name, run in runs.items() if (run / "clients.jsonl").read_text() != lines[name]] == []


@pytest.mark.slow
def test_torchvisions_resnet18_is_the_plain_loop(tmp_path: Path) -> None:
    import torchvision  # here, since the ranks of the other tests need not wait for it

    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=3)
    net.conv1, net.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()
    model = "{type: torchvision, name: resnet18, stem: cifar}"
    case = Case(
        net,
        model,
        _images(16),
        ["local.lr=0.001"],
        optimizer=partial(torch.optim.SGD, lr=0.001, weight_decay=0.01),
        rounds=1,
    )
    _write(tmp_path, case)
    found = run_job(tiny(_settings(tmp_path, case)), tmp_path / "run")
    _require_equal(case, found, (tmp_path / "run" / "clients.jsonl").read_text())
