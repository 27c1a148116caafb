"""Every local method, with every value of its options, times every augmentation, filter and amount of local work.

The tables are read from the config's own, so that a new method, option or filter is crossed with all others by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import cycle, product
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from docs.tables import NEEDS
from fedspec_dist.config import ConfigError
from fedspec_dist.config.methods import FILTERS, LOCAL_ALGORITHMS
from fedspec_dist.distributed.collectives import SingleProcess
from fedspec_dist.processes.environment import Environment
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.processes.stop import StopRequest
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.local import train_clients
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.stage import Stage
from tests.rounds.jobs import tiny


def options(parameters: dict[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Every choice of those parameters that have a few values only."""
    few = {}
    for name, (kind, _) in parameters.items():
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        values = [False, True] if kind is bool else get_args(kind) if get_origin(kind) is Literal else []
        if values:
            few[name] = values
    return [dict(zip(few, values, strict=True)) for values in product(*few.values())]


def text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def choice(name: str, chosen: dict[str, Any]) -> str:
    return "{" + ", ".join([f"type: {name}", *(f"{key}: {text(value)}" for key, value in chosen.items())]) + "}"


LOCAL = [(n, choice(n, chosen)) for n, method in LOCAL_ALGORITHMS.items() for chosen in options(method.parameters)]
AUGMENTS = ["[]", "[flip]", "[crop]", "[{type: crop, padding: 1, mode: zero}]", "[flip, {type: crop, padding: 2}]"]
AMOUNTS = [["local.epochs=1"], ["local.epochs={min: 1, max: 2}"], ["local.steps=1"], ["local.steps={min: 1, max: 3}"]]
# Nine kinds times five augmentations: each meets each amount in turn.
KEPT = [choice(name, {}) for name in FILTERS] + ["{type: rfft, order: random, schedule: [[1, 0.2]]}"]


@functools.cache
def _federation() -> Federation:
    return load_federation(tiny(["data.shape=[3, 8, 8]"]), prepares=True)


def _train(overrides: Sequence[str], is_new: bool) -> torch.Tensor:
    """The update of one client, `[P]`, as a round makes it."""
    config = tiny(["data.shape=[3, 8, 8]", "model={type: mlp, hidden: [4]}", "local.batch_size=20", *overrides])
    runtime = Runtime(Environment(), torch.device("cpu"), "none", SingleProcess(), StopRequest())
    federation, (phase,) = _federation(), config.schedule()
    stage = Stage(config, phase, build_model(config, federation.dataset), federation, runtime)
    client = int(np.argmin([len(samples) for samples in federation.clients]))
    states = {} if is_new else {client: torch.full((stage.states.size,), 0.01)}
    work = [(client, stage.loads(0, [client])[0])]
    result = train_clients(config, runtime, federation, stage, stage.sent(0), work, states)
    assert all(uploaded.isfinite().all() for uploaded in result.rows.uploads.values())
    assert result.reports[0].numbers.isfinite().all()
    return result.rows.updates[0, : len(stage.theta)]


@pytest.mark.parametrize(("name", "local"), LOCAL, ids=[local for _, local in LOCAL])
def test_a_local_method_goes_with_every_augmentation_filter_and_amount(name: str, local: str) -> None:
    needed = NEEDS.get(("local.algorithm", name), [])
    refused = set()
    for (augment, kept), amount, is_new in zip(
        product(AUGMENTS, KEPT), cycle(AMOUNTS), cycle([True, True, False, True, False]), strict=False
    ):
        overrides = [*needed, f"local.algorithm={local}", f"data.augment={augment}", f"filter={kept}", *amount]
        try:
            update = _train(overrides, is_new)
        except ConfigError as error:
            refused.add((kept, str(error).partition(":")[0]))
            continue
        assert update.isfinite().all(), overrides
        assert update.any(), overrides
    expected = {("{type: none}", "local.algorithm.filter_ascent")} if "filter_ascent: true" in local else set()
    assert refused == expected


def test_the_tables_are_those_of_the_methods() -> None:
    """The option that no table had crossed with an augmentation, and the number of options there are."""
    assert ("scaffold", "{type: scaffold, option: 1}") in LOCAL
    assert options({"a": (Annotated[bool, "x"], False), "b": (Literal["p", "q"], "p"), "c": (float, 0.0)}) == [
        {"a": a, "b": b} for a in (False, True) for b in ("p", "q")
    ]
    assert {name for name, _ in LOCAL} == set(LOCAL_ALGORITHMS)
