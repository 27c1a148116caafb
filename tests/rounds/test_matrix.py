"""The whole matrix of methods: a pair either runs two rounds with finite results, or config refuses it and says why."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest

from docs.tables import pair_overrides, refusal
from fedspec_dist.config import ConfigError, load
from fedspec_dist.config.methods import FAMILIES
from tests.rounds.jobs import run_job, tiny

Named = tuple[str, str]


def _all_pairs(left: str, right: str) -> list[tuple[Named, Named]]:
    return [((left, a), (right, b)) for a, b in product(FAMILIES[left].table, FAMILIES[right].table)]


PAIRS = [
    *_all_pairs("local.algorithm", "server.aggregator"),
    *_all_pairs("local.algorithm", "filter"),
    *_all_pairs("server.weights", "server.aggregator"),
    *_all_pairs("local.algorithm", "server.transforms"),
    *_all_pairs("server.transforms", "server.aggregator"),
    *_all_pairs("server.weights", "server.transforms"),
    *_all_pairs("server.optimizer", "server.weights"),
    *_all_pairs("server.optimizer", "server.aggregator"),
    *_all_pairs("local.algorithm", "server.optimizer"),
    *_all_pairs("local.algorithm", "server.weights"),
]
LEGAL = [pair for pair in PAIRS if refusal(*pair) is None]


def _name(pair: tuple[Named, Named]) -> str:
    return f"{pair[0][1]} x {pair[1][1]}"


@pytest.mark.parametrize("pair", LEGAL, ids=_name)
def test_a_legal_pair_runs(pair: tuple[Named, Named], tmp_path: Path) -> None:
    quick = ["server.weights.epochs=2"] if ("server.weights", "fedlaw") in pair else []
    config = tiny([*pair_overrides(*pair), *quick])
    finished = run_job(config, tmp_path)
    assert all(tensor.isfinite().all() for tensor in finished.model.values())
    assert [record["round"] for record in finished.records] == [1, 2]
    numbers = [value for record in finished.records for value in record.values() if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)


# Every pair that is refused, with what the message must say: the key to change and what goes instead.
REFUSED = {
    **{
        ("fednova", aggregator): r"^local\.algorithm: got 'fednova', .*add the aggregator"
        for aggregator in FAMILIES["server.aggregator"].table
        if aggregator != "fednova"
    },
    **{
        (local, "fednova"): r"^server\.aggregator: got 'fednova' .*any other aggregator"
        for local in ("feddyn", "feddc")
    },
    **{
        (weights, aggregator): r"^server\.weights: .*ignores weights; allowed .*uniform, samples"
        for weights in ("feddisco", "fedawa", "fedlaw")
        for aggregator in ("median", "trimmed_mean", "krum", "multi_krum")
    },
    **{
        (local, transform): r"^server\.transforms: got clip with a local\.algorithm .*allowed with them: no clip"
        for local in ("scaffold", "feddyn", "feddc", "fedcm", "mofedsam")
        for transform in ("clip", "noise")
    },
    **{
        (weights, transform): r"^server\.weights: got weights .*allowed with clip: uniform, samples, feddisco"
        for weights in ("fedawa", "fedlaw")
        for transform in ("clip", "noise")
    },
    ("fedgh", "fedgh"): r"^server\.aggregator: got 'fedgh' after server\.transforms that have it .*: fedavg",
    ("fedlaw", "fedlws"): r"^server\.weights: got 'fedlaw' .*shrunk twice; allowed with fedlws: any other",
    **{
        (optimizer, shrinking): r"^server\.optimizer: .*like a gradient; allowed with them: sgd"
        for optimizer in ("momentum", "adagrad", "adam", "yogi")
        for shrinking in ("fedlws", "fedlaw")
    },
    **{
        (local, optimizer): r"^server\.optimizer: .*summed twice, and diverges; allowed with them: sgd"
        for optimizer in ("momentum", "adagrad", "adam", "yogi")
        for local in ("feddyn", "feddc")
    },
}


# An account of the privacy spent, with what it needs.
SAFE = ["server.transforms=[clip, {type: noise, delta: 1e-5}]", "server.weights=uniform"]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in LEGAL], ids=_name)
def test_a_refused_pair_says_why(pair: tuple[Named, Named]) -> None:
    with pytest.raises(ConfigError, match=REFUSED[pair[0][1], pair[1][1]]):
        load(None, pair_overrides(*pair))


def test_no_more_and_no_less_is_refused() -> None:
    refused = {(pair[0][1], pair[1][1]) for pair in PAIRS if pair not in LEGAL}
    assert refused == set(REFUSED)
    assert len(LEGAL) > 250


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.aggregator=inco"], r"^server\.aggregator: got 'inco', .*model resnet20"),
        (
            ["local.algorithm={type: fedprox, mu: 40}", "server.aggregator=fednova", "local.lr=0.05"],
            r"^local\.algorithm\.mu: got a pull with local\.lr \* mu >= 2, .*allowed: mu below 2 / local\.lr",
        ),
        (["server.transforms=[noise]"], r"^server\.transforms: got noise without a clip before it"),
        (["server.transforms=[noise, clip]"], r"^server\.transforms: got noise without a clip before it"),
        (["server.transforms=[clip, noise, fedgh]"], r"^server\.transforms: got something after noise"),
        (["server.transforms=[clip, clip]"], r"^server\.transforms: .*each transform at most once"),
        (
            ["server.aggregator={type: krum, byzantine: 0.4}"],
            r"^server\.aggregator\.byzantine: got a share .*K >= 2 f \+ 3; allowed: a smaller share, or more",
        ),
        *(
            (
                [*SAFE, *change],
                rf"^{key}: does not go with a delta of noise, an account of the privacy spent; allowed: {allowed}",
            )
            for change, key, allowed in (
                (["server.weights=samples"], r"server\.weights", "uniform"),
                (["server.aggregator=median"], r"server\.aggregator", "fedavg"),
                (["local.algorithm=fednova", "server.aggregator=fednova"], r"server\.aggregator", "fedavg"),
                (
                    ["server.transforms=[clip, fedgh, {type: noise, delta: 1e-5}]"],
                    r"server\.transforms",
                    r"\[clip, noise\]",
                ),
                (
                    ["server.transforms=[clip, {type: noise, multiplier: 0, delta: 1e-5}]"],
                    r"server\.transforms",
                    "a mult",
                ),
                (["runtime.on_nonfinite=skip"], r"runtime\.on_nonfinite", "raise"),
                (["phases=[{rounds: 1}, {rounds: 2}]"], "phases", "one phase"),
            )
        ),
        (["server.aggregator=fedlws", "server.filter=rfft"], r"^server\.filter: got a filter .*allowed with it: none"),
        (["server.aggregator={type: fedlws, min_tau: 0.3}"], r"^server\.aggregator\.max_tau: got less than min_tau"),
        (
            ["local.algorithm={type: fedsam, eta: 0.1}"],
            r"^local\.algorithm\.eta: got a value that only .*set local\.algorithm\.adaptive: true, or leave",
        ),
        (
            ["local.algorithm={type: mofedsam, filter_ascent: true}", "filter=none"],
            r"^local\.algorithm\.filter_ascent: got true without a filter",
        ),
        (["local.algorithm=fedrcl", "model={type: mlp, hidden: []}"], r"^local\.algorithm: got .*model\.hidden"),
        (
            ["local.algorithm={type: fedprox, mu: 0.1}", "local.momentum=0.9", "server.aggregator=fednova"],
            r"^local\.momentum: got a momentum together with mu > 0 .*allowed: momentum 0, or mu 0",
        ),
        (
            ["phases=[{rounds: 2}, {rounds: 2, local: {algorithm: fednova}}]"],
            r"^phases\.1\.local\.algorithm: got 'fednova'",
        ),
    ],
)
def test_other_combinations_that_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["local.algorithm={type: fednova, mu: 0.0}", "local.momentum=0.9", "server.aggregator=fednova"],
        ["local.algorithm={type: fedprox, mu: 0.1}", "server.aggregator=fednova"],
        ["local.algorithm={type: fedprox, mu: 0.1}", "local.momentum=0.9"],
        ["local.algorithm=moon", "model={type: mlp, hidden: [], projection: 4}"],
        ["local.algorithm={type: fedsam, adaptive: true, eta: 0.1}"],
        SAFE,
        [*SAFE, "local.algorithm=moon", "server.optimizer=adam", "sampling=bernoulli", "dropout=0.1"],
        [
            "server.transforms=[{type: clip, norm: 2.0}, fedgh, {type: noise, multiplier: 0.5}]",
            "server.aggregator=median",
        ],
        ["server.aggregator={type: krum, byzantine: 0.4}", "clients_per_round=7"],
        ["server.transforms=fedgh"],
    ],
)
def test_what_a_rule_is_not_about_passes(overrides: list[str]) -> None:
    load(None, overrides)
