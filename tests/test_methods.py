"""The table of methods against the classes that it names."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from fedspec_dist.config import ConfigError, load, methods

TABLES = {
    "tasks": methods.TASKS,
    "statistics": methods.STATISTICS,
    "datasets": methods.DATASETS,
    "partitions": methods.PARTITIONS,
    "models": methods.MODELS,
    "local": methods.LOCAL_ALGORITHMS,
    "local optimizers": methods.LOCAL_OPTIMIZERS,
    "filters": methods.FILTERS,
    "aggregators": methods.AGGREGATORS,
    "weights": methods.WEIGHTS,
    "transforms": methods.TRANSFORMS,
    "optimizers": methods.SERVER_OPTIMIZERS,
    "attacks": methods.ATTACKS,
}
# Arguments that the program fills in.
GIVEN = {
    "datasets": {"root", "download", "seed"},
    "statistics": {"material"},
    "partitions": {"samples", "num_clients", "rng"},
    "models": {"input_shape", "num_classes", "num_outputs", "vocabulary_size"},
    "filters": {"segments"},
    "weights": {"num_samples"},
    "local optimizers": {"momentum", "weight_decay", "clip_norm"},
}
ROWS = [(family, name) for family, table in TABLES.items() for name in table]


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_a_row_has_the_parameters_of_its_class_which_repeats_no_default(family: str, name: str) -> None:
    row = TABLES[family][name]
    parameters = inspect.signature(row.load()).parameters
    # `num_classes` and the like of a data set may have the program's names and still be its own.
    own = {key: p for key, p in parameters.items() if key not in GIVEN.get(family, set())}
    # A row may have another default for what its family shares, which the program hands over.
    shared = set(methods.PARTITION_COMMON) if family == "partitions" else set()
    assert set(own) <= set(row.parameters) <= set(parameters) | shared
    assert {parameters[key].default for key in row.parameters if key in parameters} <= {inspect.Parameter.empty}


def test_what_is_not_given_is_the_default_of_the_line() -> None:
    fipa = methods.AGGREGATORS["fipa"].build(rank=3)
    assert (fipa.rank, fipa.step) == (3, methods.AGGREGATORS["fipa"].parameters["step"][1])
    clip = methods.TRANSFORMS["clip"].build(5.0)
    assert clip.norm == 5.0


def test_a_name_that_is_given_to_another_method_has_the_parameters_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.AGGREGATORS, "mine", methods.method("mine:A"))
    assert load(None, ["server.aggregator=mine"]).server.aggregator.parameters() == {}
    monkeypatch.setitem(methods.AGGREGATORS, "mine", methods.method("mine:B", mu=(methods.Positive, 0.5)))
    assert load(None, ["server.aggregator=mine"]).server.aggregator.parameters() == {"mu": 0.5}


NAN, INF = float("nan"), float("inf")
# Values outside what a parameter may be, as the papers and the formulas have it.
REFUSED: dict[str, dict[str, list[Any]]] = {
    "data": {
        "synthetic.shape": [[3, 32]],
        "synthetic.num_train": [0],
        "synthetic.num_test": [0],
        "synthetic.num_classes": [1],
    },
    "model": {
        "cnn.width": [3, 0],
        "cnn.norm": ["layer"],
        "resnet20.norm": [2],
        "mlp.hidden": [200],
        "mlp.projection": [0],
    },
    "data.partition": {
        **{f"{kind}.alpha": [0.0, -1.0, NAN, INF] for kind in methods.PARTITIONS if kind.startswith("dirichlet")},
        "shards.shards_per_client": [0],
        "pathological.classes_per_client": [0],
        "quantity_skew.sigma": [-0.1, NAN, INF],
        "iid.clients": [0],
    },
    "filter": {"rfft.ratio": [-0.1, 1.0, NAN]},
    "local.algorithm": {
        "fedprox.mu": [-1.0, INF],
        "fednova.mu": [NAN],
        "scaffold.option": [3],
        "feddyn.alpha": [-0.1],
        "feddc.alpha": [-0.1],
        "fedcm.alpha": [0.0, 1.5],
        "fedsam.rho": [-1.0],
        "fedsam.eta": [-1.0],
        "mofedsam.rho": [-1.0],
        "mofedsam.alpha": [2.0],
        "fedlc.tau": [-1.0],
        "fedlc.denominator": ["none"],
        "feddecorr.beta": [-1.0],
        "moon.mu": [-1.0],
        "moon.temperature": [0.0],
        "fedrcl.temperature": [0.0],
        "fedrcl.threshold": [1.1],
        "fedrcl.contrast_weight": [-1.0],
        "fedrcl.relaxation_weight": [-1.0],
    },
    "local.optimizer": {"adam.beta1": [1.0], "adam.beta2": [-0.1, 1.0], "adamw.epsilon": [0.0]},
    "server.aggregator": {
        "fedgh.mode": ["both"],
        "fedlws.beta": [-1.0, NAN],
        "fedlws.min_tau": [-0.1],
        "fipa.rank": [0],
        "fipa.oversampling": [-1],
        "fipa.power_iterations": [-1],
        "fipa.damping": [-0.1],
        "fipa.step": [0.0, NAN],
        "fipa.convention": ["paper"],
        "fipa.merge": ["svd"],
        "inco.clamp_max": [-1.0, NAN],
        "krum.byzantine": [0.5],
        "multi_krum.byzantine": [-0.1],
        "multi_krum.keep": [0],
        "geometric_median.smoothing": [0.0],
        "geometric_median.iterations": [0],
        "centered_clipping.radius": [0.0],
        "centered_clipping.iterations": [0],
        "trimmed_mean.trim": [-0.1, 0.5, 1.0, NAN],
    },
    "server.weights": {
        "feddisco.a": [-0.1],
        "feddisco.b": [INF],
        "feddisco.metric": ["l3"],
        "feddisco.target": ["train"],
        "fedawa.optimizer": ["adamw"],
        "fedawa.lr": [0.0],
        "fedawa.weight_decay": [-1.0],
        "fedawa.server_epochs": [-1],
        "fedlaw.epochs": [-1],
        "fedlaw.lr": [NAN],
        "fedlaw.batch_size": [0],
        "fedlaw.proxy_fraction": [0.0, 1.0],
    },
    "server.optimizer": {
        **{f"{name}.lr": [0.0, -1.0, NAN] for name in methods.SERVER_OPTIMIZERS},
        "momentum.beta": [1.0],
        "adagrad.beta1": [1.0],
        "adam.beta2": [1.1],
        "adam.initial_accumulator": [-1.0],
        "yogi.beta2": [-0.1],
        "yogi.tau": [0.0],
    },
    "server.transforms": {
        "clip.norm": [0.0],
        "fedgh.mode": ["other"],
        "noise.multiplier": [-1.0],
        "noise.delta": [0.0],
    },
    "clients.attack": {"sign_flip.factor": [0.0], "scale.factor": [-1.0], "gaussian.std": [0.0]},
}


@pytest.mark.parametrize(
    ("key", "parameter", "value"),
    [
        (key, *row)
        for key, rows in REFUSED.items()
        for row in ((p, value) for p, values in rows.items() for value in values)
    ],
)
def test_a_value_outside_its_bounds_is_refused(key: str, parameter: str, value: Any) -> None:
    name, _, own = parameter.partition(".")
    written = {"nan": ".nan", "inf": ".inf"}.get(str(value), str(value))
    place, kind = (".0" if key == "server.transforms" else ""), ("dataset" if key == "data" else "type")
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key}{place}.{own}')}: got {re.escape(repr(value))}; "):
        load(None, [f"{key}={{{kind}: {name}, {own}: {written}}}"])


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_the_words_of_a_row_are_explained(family: str, name: str) -> None:
    row = TABLES[family][name]
    assert row.needs | row.gives <= methods.NEEDS.keys() | methods.STATISTICS.keys()
    assert row.traits <= methods.TRAITS.keys()


def test_a_word_that_nobody_knows_is_refused() -> None:
    for kind in ("needs", "gives", "traits"):
        with pytest.raises(ValueError, match=rf"^register: server\.weights 'mine' {kind} 'odd'; allowed: "):
            methods.register("server.weights", "mine", "mine:A", **{kind: {"odd"}})  # type: ignore[arg-type]


# A list of methods beside the table is a trait written in a second place: the next method is forgotten there.
SCANNED = ("fedspec_dist", "launch", "docs")
# (file, names) that are of something else.
OF_OTHERS = {("fedspec_dist/server/weights/fedawa.py", ("adam", "sgd"))}  # torch's optimizers


def lists_of_names(source: str) -> list[tuple[int, tuple[str, ...]]]:
    """Sets, lists, tuples and keys of mappings that consist of two or more methods of one family."""
    families = [frozenset(family.table) for family in methods.FAMILIES.values()]
    found = []
    for node in ast.walk(ast.parse(source)):
        entries = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        values = {getattr(entry, "value", None) for entry in entries}
        if len(values) > 1 and any(values <= family for family in families):
            found.append((node.lineno, tuple(sorted(values))))
    return found


@pytest.mark.parametrize("folder", SCANNED)
def test_what_methods_are_stands_beside_their_lines_only(folder: str) -> None:
    root = Path(__file__).parents[1]
    found = {
        (str(path.relative_to(root)), names)
        for path in (root / folder).rglob("*.py")
        if path != root / "fedspec_dist" / "config" / "methods.py"
        for _, names in lists_of_names(path.read_text())
    }
    assert found - OF_OTHERS == set()


@pytest.mark.parametrize(
    "written", ["{'adam', 'yogi'}", "('fedavg', 'moon')", "{'lapd': 9, 'none': 0}", "x in ['krum', 'median']"]
)
def test_such_a_list_is_found(written: str) -> None:
    assert lists_of_names(written)
    assert not lists_of_names("{'adam', 'other'}, {'adam': 1}, {'moon', 'krum'}")
