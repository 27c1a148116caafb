"""The table of methods against the classes that it names."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from fedspec_dist.config import methods

TABLES = {
    "datasets": methods.DATASETS,
    "partitions": methods.PARTITIONS,
    "models": methods.MODELS,
    "local": methods.LOCAL_ALGORITHMS,
    "filters": methods.FILTERS,
    "aggregators": methods.AGGREGATORS,
    "weights": methods.WEIGHTS,
    "transforms": methods.TRANSFORMS,
    "optimizers": methods.SERVER_OPTIMIZERS,
    "attacks": methods.ATTACKS,
    "statistics": methods.STATISTICS,
    "tasks": methods.TASKS,
    "local optimizers": methods.LOCAL_OPTIMIZERS,
}
# Arguments that the program fills in.
GIVEN = {
    "datasets": {"root", "download", "seed"},
    "partitions": {"samples", "num_clients", "rng"},
    "models": {"input_shape", "num_classes", "num_outputs", "vocabulary_size"},
    "filters": {"segments"},
    "weights": {"num_samples"},
    "statistics": {"material"},
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
