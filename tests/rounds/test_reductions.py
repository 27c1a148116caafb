"""Settings in which a method is another one, in whole runs: bit for bit, and those of which it is wrongly believed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rounds.jobs import run_job, tiny

FEDAVG: list[str] = []
FULL = ["clients_per_round=6"]
ALONE = ["clients_per_round=1", "data.partition={type: iid, clients: 1}"]
EQUAL = ["data.partition={type: iid, clients: 6}", "local.batch_size=15"]  # one step each
UNIFORM = ["server.weights=uniform"]

# What is set, what it then is, what both have besides.
EXACT: dict[str, tuple[list[str], list[str], list[str]]] = {
    "fedprox mu 0": (["local.algorithm={type: fedprox, mu: 0.0}"], FEDAVG, []),
    "fedprox one step": (["local.algorithm={type: fedprox, mu: 0.5}"], FEDAVG, ["local.steps=1"]),
    "scaffold first round": (["local.algorithm=scaffold"], FEDAVG, ["rounds=1"]),
    "scaffold one client": (["local.algorithm=scaffold"], FEDAVG, [*ALONE, "rounds=6"]),
    "feddc first round is feddyn's": (
        ["local.algorithm={type: feddc, alpha: 0.1}"],
        ["local.algorithm={type: feddyn, alpha: 0.1}"],
        ["rounds=1", *UNIFORM, *EQUAL],
    ),
    "fedcm alpha 1": (["local.algorithm={type: fedcm, alpha: 1.0}"], FEDAVG, []),
    "fedsam rho 0": (["local.algorithm={type: fedsam, rho: 0.0}"], FEDAVG, []),
    "asam rho 0": (["local.algorithm={type: fedsam, rho: 0.0, adaptive: true}"], FEDAVG, []),
    "mofedsam rho 0": (["local.algorithm={type: mofedsam, rho: 0.0}"], ["local.algorithm=fedcm"], []),
    "mofedsam alpha 1": (["local.algorithm={type: mofedsam, alpha: 1.0}"], ["local.algorithm=fedsam"], []),
    "fedlc tau 0": (["local.algorithm={type: fedlc, tau: 0.0}"], FEDAVG, []),
    "feddecorr beta 0": (["local.algorithm={type: feddecorr, beta: 0.0}"], FEDAVG, []),
    "moon mu 0": (["local.algorithm={type: moon, mu: 0.0}"], FEDAVG, []),
    "moon first round": (["local.algorithm={type: moon, mu: 5.0}"], FEDAVG, ["rounds=1"]),
    "fedrcl weights 0": (
        ["local.algorithm={type: fedrcl, contrast_weight: 0.0, relaxation_weight: 0.0}"],
        FEDAVG,
        [],
    ),
    "fednova without mu is fedavg's step": (
        ["local.algorithm=fednova", "server.aggregator=fednova"],
        ["local.algorithm=fedavg", "server.aggregator=fednova"],
        [],
    ),
    "fednova with mu is fedprox's step": (
        ["local.algorithm={type: fednova, mu: 0.1}", "server.aggregator=fednova"],
        ["local.algorithm={type: fedprox, mu: 0.1}", "server.aggregator=fednova"],
        [],
    ),
    "feddisco a b 0": (["server.weights={type: feddisco, a: 0.0, b: 0.0}"], FEDAVG, []),
    "fedlaw epochs 0": (
        ["server.weights={type: fedlaw, epochs: 0, proxy_fraction: 0.2}"],
        FEDAVG,
        ["eval.every=2"],  # the test sets differ, the models do not
    ),
    "fedlws tau 0": (["server.aggregator={type: fedlws, min_tau: 0.0, max_tau: 0.0}"], FEDAVG, []),
    "momentum beta 0": (["server.optimizer={type: momentum, beta: 0.0}"], FEDAVG, []),
    "fedgh one client": (["server.aggregator=fedgh"], FEDAVG, ALONE),
    "fisher_diagonal one client": (["server.aggregator=fisher_diagonal"], FEDAVG, ALONE),
    "median one client": (["server.aggregator=median"], FEDAVG, ALONE),
    "fednova one client": (["server.aggregator=fednova"], FEDAVG, ALONE),
    "fedawa one client": (["server.weights=fedawa"], FEDAVG, ALONE),
    "trim 0 is uniform": (["server.aggregator={type: trimmed_mean, trim: 0.0}"], FEDAVG, ["clients_per_round=1"]),
    "rfft cut 0": (["filter={type: rfft, ratio: 0.0}"], FEDAVG, []),
    "a filter on tensors of two axes or more": (
        ["filter={type: rfft, ratio: 0.3, min_dim: 2}"],
        ["filter={type: rfft, ratio: 0.3, layers: ['conv*.weight', 'fc.weight']}"],
        [],
    ),
    "a schedule that stays": (["filter={type: rfft, schedule: [[1, 0.1]]}"], ["filter={type: rfft, ratio: 0.1}"], []),
    "server filter cut 0": (["server.filter={type: rfft, ratio: 0.0}"], FEDAVG, []),
    "a range of one": (["local.epochs={min: 2, max: 2}"], ["local.epochs=2"], []),
    "steps of an epoch": (["local.steps=3"], ["local.epochs=1"], EQUAL[:1]),
}
# Up to rounding only.
CLOSE: dict[str, tuple[list[str], list[str], list[str]]] = {
    "scaffold option 1, one client": (
        ["local.algorithm={type: scaffold, option: 1}"],
        FEDAVG,
        [*ALONE, "rounds=4", "local.weight_decay=0.0"],
    ),
    "scaffold one step, all clients": (["local.algorithm=scaffold"], FEDAVG, [*FULL, *UNIFORM, *EQUAL, "rounds=4"]),
    "moon one client": (["local.algorithm=moon"], FEDAVG, [*ALONE, "rounds=4"]),
    "fednova equal steps": (["server.aggregator=fednova"], FEDAVG, EQUAL),
    "fedlc equal counts": (["local.algorithm=fedlc"], FEDAVG, [*ALONE, "rounds=4"]),
    "trim 0": (["server.aggregator={type: trimmed_mean, trim: 0.0}"], FEDAVG, UNIFORM),
}
# Wrong beliefs (section 11.2 of the project's specification of methods), and settings that must matter.
DIFFERENT: dict[str, tuple[list[str], list[str], list[str]]] = {
    "feddyn alpha 0": (["local.algorithm={type: feddyn, alpha: 0.0}"], FEDAVG, []),
    "feddyn one client": (["local.algorithm=feddyn"], FEDAVG, ALONE),
    "fedlws beta 0": (["server.aggregator={type: fedlws, beta: 0.0}"], FEDAVG, []),
    "fedlws one client": (["server.aggregator=fedlws"], FEDAVG, ALONE),
    "fedawa zero epochs": (["server.weights={type: fedawa, server_epochs: 0}"], FEDAVG, []),
    "adam one client": (["server.optimizer=adam"], FEDAVG, ALONE),
    "scaffold second round": (["local.algorithm=scaffold"], FEDAVG, FULL),
    "rfft one client": (["filter={type: rfft, ratio: 0.1}"], FEDAVG, ALONE),
    "a filtered ascent": (
        ["local.algorithm={type: fedsam, filter_ascent: true}"],
        ["local.algorithm=fedsam"],
        ["filter={type: rfft, ratio: 0.3}"],
    ),
    "a filtered ascent with momentum": (
        ["local.algorithm={type: mofedsam, filter_ascent: true}"],
        ["local.algorithm=mofedsam"],
        ["filter={type: rfft, ratio: 0.3}"],
    ),
    "uneven work": (["local.epochs={min: 1, max: 4}"], FEDAVG, []),
    "feddisco's target": (
        ["server.weights={type: feddisco, target: test}"],
        ["server.weights=feddisco"],
        ["data.num_test=20"],  # not as many of each class
    ),
    "dropout": (["dropout=0.5"], FEDAVG, []),
}


def _model(settings: list[str], folder: Path) -> dict[str, Tensor]:
    return run_job(tiny(settings), folder).model


def _pair(case: tuple[list[str], list[str], list[str]], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    left, right, both = case
    return _model([*both, *left], folder / "left"), _model([*both, *right], folder / "right")


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_bit_for_bit(case: tuple[list[str], list[str], list[str]], tmp_path: Path) -> None:
    left, right = _pair(case, tmp_path)
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


@pytest.mark.parametrize("case", CLOSE.values(), ids=CLOSE)
def test_up_to_rounding(case: tuple[list[str], list[str], list[str]], tmp_path: Path) -> None:
    left, right = _pair(case, tmp_path)
    for name, tensor in right.items():
        torch.testing.assert_close(left[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", DIFFERENT.values(), ids=DIFFERENT)
def test_not_the_same(case: tuple[list[str], list[str], list[str]], tmp_path: Path) -> None:
    left, right = _pair(case, tmp_path)
    assert max(float((left[name] - tensor).abs().max()) for name, tensor in right.items()) > 1e-5
