"""The table of methods against the classes that it names."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import get_args

import pytest

from fedspec_dist.config import methods

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
def test_a_row_has_the_parameters_and_defaults_of_its_class(family: str, name: str) -> None:
    row = TABLES[family][name]
    signature = inspect.signature(row.load())
    own = {key: p for key, p in signature.parameters.items() if key not in GIVEN.get(family, set())}
    # `num_classes` and the like of a data set may have the program's names and still be its own.
    # A row may have another default for what its family shares, which the program hands over.
    shared = set(methods.PARTITION_COMMON) if family == "partitions" else set()
    assert set(own) <= set(row.parameters) <= set(signature.parameters) | shared
    for key, parameter in own.items():
        default = row.parameters[key][1]
        if default is ...:
            assert parameter.default is parameter.empty
        else:
            given = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            assert given == default


def test_literals_in_the_table_are_the_choices_of_the_class() -> None:
    from fedspec_dist.server.aggregators import fipa

    parameters = methods.AGGREGATORS["fipa"].parameters
    assert get_args(parameters["convention"][0]) == fipa.CONVENTIONS
    assert get_args(parameters["merge"][0]) == fipa.MERGES


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
