"""The product is a plain PyTorch loop: networks with state, sequences, tables, Adam, parts that clients keep."""

from __future__ import annotations

import copy
import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedspec_dist.distributed.collectives import Collectives
from tests.distributed.harness import run_ranks
from tests.plain.loop import PlainFederation
from tests.plain.nets import BatchNormNet, Lstm, Mlp
from tests.rounds.jobs import run_job, tiny

ROUNDS = 3
RNG = np.random.default_rng(1)
# Four clients; one has a single sample, and another leaves one over in each epoch.
OWNERS = np.repeat([0, 1, 2, 3], [6, 9, 1, 8])
NUM = len(OWNERS)
HERE = "tests.plain.nets"


def _language_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _images() -> tuple[np.ndarray, np.ndarray]:
    return RNG.standard_normal((NUM, 1, 6, 6)), RNG.integers(3, size=NUM)


def _table() -> tuple[np.ndarray, np.ndarray]:
    x = RNG.standard_normal((NUM, 3))
    return x, x @ RNG.standard_normal((3, 2)) + 1


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    tokens = RNG.integers(7, size=(NUM, 5))
    targets = np.roll(tokens, -1, axis=1)
    targets[:, -1] = -100
    return tokens, targets


_SGD = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)


@dataclass(frozen=True)
class Case:
    net: nn.Module
    model: str
    data: tuple[np.ndarray, np.ndarray]
    settings: Sequence[str] = ()
    plain: dict[str, Any] = field(default_factory=dict)
    loss: Any = cross_entropy
    optimizer: Any = _SGD


def _case(kind: str, settings: Sequence[str] = (), **changes: Any) -> Case:
    torch.manual_seed(0)
    made = {
        "norms": (BatchNormNet(), f"{{type: module, path: '{HERE}:BatchNormNet'}}", _images()),
        "table": (Mlp((3,), 2), f"{{type: module, path: '{HERE}:Mlp'}}", _table()),
        "tokens": (Lstm(7, 7), f"{{type: module, path: '{HERE}:Lstm', arguments: {{vocabulary_size: 7}}}}", _tokens()),
    }[kind]
    more = {"table": ["task=regression"], "tokens": ["task=language"], "norms": []}[kind]
    losses = {"table": mse_loss, "tokens": _language_loss, "norms": cross_entropy}
    return Case(*made, settings=[*more, *settings], **{"loss": losses[kind], **changes})


_MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
HEAD, NORMS = ("head.*",), ("norm.*",)
BODY = ("conv.*", "norm.*")
CASES = {
    **{
        f"batch norm, {mode}": _case("norms", [f"model.buffers={mode}"], plain={"buffers": mode})
        for mode in ("aggregate", "local", "freeze")
    },
    "an lstm on tokens": _case("tokens"),
    "momentum": _case("table", ["local.momentum=0.9"], optimizer=_MOMENTUM),
    "adam": _case("table", ["local.optimizer=adam"], optimizer=partial(torch.optim.Adam, lr=0.1, weight_decay=0.01)),
    "adamw": _case("table", ["local.optimizer=adamw"], optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01)),
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
    "fedrep": _case(
        "table",
        [
            *("server.shared=['body.*']", "local.keep=['head.*']", "local.momentum=0.9"),
            "local.schedule=[{epochs: 2, train: ['head.*']}, {epochs: 1, train: ['body.*']}]",
        ],
        plain={"shared": ("body.*",), "keep": HEAD, "schedule": ((2, HEAD), (1, ("body.*",)))},
        optimizer=_MOMENTUM,
    ),
}


def _write(folder: Path, case: Case) -> None:
    """The data and the initial weights."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = case.data
    arrays = {"inputs": x, "targets": y, "clients": OWNERS}
    np.savez(folder / "d.npz", **{f"{s}_{name}": a for s in ("train", "test") for name, a in arrays.items()})
    save_file({name: tensor.clone() for name, tensor in case.net.state_dict().items()}, folder / "w.safetensors")


def _settings(folder: Path, case: Case) -> list[str]:
    """With which the product takes them."""
    return [
        f"data={{dataset: npz, path: {folder}/d.npz, root: {folder}}}",
        f"data.num_classes={7 if 'task=language' in case.settings else 'null'}",
        "data.partition={type: natural, clients: null}",
        f"model={case.model}",
        f"init={{weights: {folder}/w.safetensors}}",
        *("clients_per_round=2", f"rounds={ROUNDS}", "local.lr=0.1", "local.weight_decay=0.01", "local.batch_size=4"),
        *("runtime.dtype=float64", "checkpoint.every=1"),
        *([] if any("schedule" in text for text in case.settings) else ["local.epochs=2"]),
        *case.settings,
    ]


def _plain(case: Case) -> dict[str, Tensor]:
    x, y = (torch.from_numpy(part) for part in case.data)
    net = copy.deepcopy(case.net).double()
    federation = PlainFederation(net, x, y, OWNERS, case.loss, case.optimizer, **case.plain)
    for index in range(ROUNDS):
        federation.round(index)
    return net.state_dict()


def _stopped(collectives: Collectives, folder: str) -> dict[str, dict[str, Tensor]]:
    """Of each case the model after a stop in between, on these ranks."""
    found = {}
    for name, case in CASES.items():
        path = Path(folder) / name.replace(" ", "_").replace(",", "")
        config, run = tiny(_settings(path, case)), path / f"on-{collectives.num_ranks}"
        run_job(config, run, collectives, rounds=2)
        found[name] = run_job(config, run, collectives).model
    return found


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_the_plain_loop(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _write(tmp_path, case)
    found, expected = run_job(tiny(_settings(tmp_path, case)), tmp_path / "run").model, _plain(case)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "num_batches" not in key:
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_any_number_of_ranks_and_a_stop_give_the_same_bits(tmp_path: Path) -> None:
    alone = {}
    for name, case in CASES.items():
        path = tmp_path / name.replace(" ", "_").replace(",", "")
        _write(path, case)
        alone[name] = run_job(tiny(_settings(path, case)), path / "alone").model
    for num_ranks in (2, 3):
        for found in run_ranks(_stopped, num_ranks, tmp_path, str(tmp_path), timeout_s=300):
            different = [name for name in CASES if not _same(found[name], alone[name])]
            assert not different


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aggregate", "local", "freeze"])
def test_resnet18_is_the_plain_loop(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=3)
    net.conv1, net.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()
    rng = np.random.default_rng(0)
    case = Case(
        net,
        "{type: torchvision, name: resnet18, stem: cifar}",
        (rng.standard_normal((NUM, 1, 16, 16)), rng.integers(3, size=NUM)),
        [f"model.buffers={mode}", "local.lr=0.001"],
        {"buffers": mode},
        optimizer=partial(torch.optim.SGD, lr=0.001, weight_decay=0.01),
    )
    _write(tmp_path, case)
    found, expected = run_job(tiny(_settings(tmp_path, case)), tmp_path / "run").model, _plain(case)
    for key, value in expected.items():
        if "num_batches" not in key:
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-8)


def test_regression_on_a_table_is_the_plain_loop(tmp_path: Path) -> None:
    """With the columns standardised by hand."""
    x, y = RNG.standard_normal((NUM, 3)) * 4 + 2, RNG.standard_normal((NUM, 1))
    for split in ("train", "test"):
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["a", "b", "c", "who", "y"])
            rows.writerows(
                [*features, f"u{owner}", target]
                for features, owner, target in zip(x.tolist(), OWNERS, y[:, 0].tolist(), strict=True)
            )
    torch.manual_seed(0)
    inputs = ((x - x.mean(0)) / x.std(0)).astype(np.float32).astype(np.float64)
    targets = y.astype(np.float32).astype(np.float64)
    case = Case(
        Mlp((3,), 1), f"{{type: module, path: '{HERE}:Mlp'}}", (inputs, targets), ["task=regression"], loss=mse_loss
    )
    _write(tmp_path, case)
    settings = [text for text in _settings(tmp_path, case) if not text.startswith("data.num_classes")]
    settings[0] = (
        f"data={{dataset: csv, train: {tmp_path}/train.csv, test: {tmp_path}/test.csv, target: y, client: who, "
        f"root: {tmp_path}}}"
    )
    found, expected = run_job(tiny(settings), tmp_path / "run").model, _plain(case)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10)
