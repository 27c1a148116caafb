"""The local step and every method's formulas on `[C, P]` against the same on each client's `[P]`: all triples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client
from fedspec_dist.clients.optimizers import LocalOptimizer
from fedspec_dist.clients.step import LocalMethods, local_step
from fedspec_dist.clients.vectors import LocalVectors, widths
from fedspec_dist.config.methods import FILTERS, LOCAL_ALGORITHMS, LOCAL_OPTIMIZERS
from fedspec_dist.core.parameters import Segment

F64 = torch.float64
SEGMENTS = [Segment("fc.weight", (4, 3), 0, 12), Segment("fc.bias", (3,), 12, 3)]
NUM_PARAMETERS = 15
STEPS = (3, 1, 5)
LR = 0.1
RNG = torch.Generator().manual_seed(0)
CURVATURES, CENTRES = torch.rand(2, len(STEPS), NUM_PARAMETERS, generator=RNG, dtype=F64)
THETA, OTHER = torch.randn(2, NUM_PARAMETERS, generator=RNG, dtype=F64)
OWN = torch.randn(len(STEPS), NUM_PARAMETERS, generator=RNG, dtype=F64)


def train(
    methods: LocalMethods,
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,  # [P] or [C, P]
    own: Tensor,  # the same
    steps: Sequence[int],
    seed: int | Sequence[int],
) -> Mapping[str, Tensor]:
    """A client's round, or that of several; all that it leaves behind."""
    algorithm, at_once = methods.algorithm, start.dim() == 2

    def zeros(width: int | None = None) -> Tensor:
        return torch.zeros_like(start) if width is None else start.new_zeros(*start.shape[:-1], width)

    vectors = LocalVectors(
        *(start.clone(), zeros(), THETA.clone(), zeros(), zeros()),
        {name: own.clone() for name in algorithm.own},
        {name: OTHER.clone() for name in algorithm.broadcast},
        {name: zeros(width) for name, width in widths(algorithm.uploads).items()},
    )
    effective = [algorithm.effective_steps(each, LR, methods.optimizer.momentum) for each in steps]

    def number(values: Sequence[Any]) -> Any:
        return torch.tensor(values).unsqueeze(1) if at_once else values[0]

    client = Client(
        ids=range(len(steps)),
        round_index=0,
        seed=0,
        task_loss=lambda outputs, targets: outputs.sum(),
        loss=lambda model, inputs, targets: model(inputs).sum(),
        lr=LR,
        num_steps=number(steps),
        effective_steps=torch.tensor(effective, dtype=F64).unsqueeze(1) if at_once else effective[0],
        class_counts=torch.ones(len(steps), 2, dtype=torch.int64),
        is_new=number([False] * len(steps)),
        filter=methods.filter,
    )
    state = methods.optimizer.initial_state(vectors.parameters)
    methods.filter.prepare(2, seed)
    algorithm.begin(vectors, client)
    removed = None
    for step in range(max(steps)):
        backward = lambda: vectors.gradient.copy_(gradient(vectors.parameters))  # noqa: E731
        algorithm.gradient(vectors, backward, client)
        active = number([step < each for each in steps]) if at_once else None
        measured = local_step(methods, vectors, state, LR, active=active, measure=step == 0)
        removed = removed if measured is None else measured
    update = vectors.parameters - THETA
    algorithm.end(vectors, update, client)
    assert removed is not None
    return {"update": update, "removed": removed, **vectors.own, **vectors.uploads}


def made(local: str, optimizer: str, filter: str) -> LocalMethods:
    algorithm = LOCAL_ALGORITHMS[local].build()
    algorithm.bind(SEGMENTS)
    momentum = 0.9 if optimizer == "sgd" else 0.0
    stepping: LocalOptimizer = LOCAL_OPTIMIZERS[optimizer].build(momentum, 0.1, 0.5)
    return LocalMethods(FILTERS[filter].build(SEGMENTS), algorithm, stepping)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("optimizer", LOCAL_OPTIMIZERS)
@pytest.mark.parametrize("local", LOCAL_ALGORITHMS)
def test_several_clients_at_once_are_each_of_them(local: str, optimizer: str, filter: str) -> None:
    seeds = [5, 6, 7]
    together = train(
        made(local, optimizer, filter),
        lambda y: CURVATURES * (y - CENTRES),
        THETA.expand(len(STEPS), -1),
        OWN,
        STEPS,
        seeds,
    )
    for place, steps in enumerate(STEPS):
        alone = train(
            made(local, optimizer, filter),
            lambda y, place=place: CURVATURES[place] * (y - CENTRES[place]),  # type: ignore[misc]
            THETA,
            OWN[place],
            [steps],
            seeds[place],
        )
        assert alone.keys() == together.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(together[name][place], expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("optimizer", LOCAL_OPTIMIZERS)
def test_a_mask_of_entries_is_ranges_of_each_client(optimizer: str) -> None:
    ranges = [[(0, 12)], [(12, 15)], [(2, 4), (7, 15)]]
    methods = made("scaffold", optimizer, "rfft")
    vectors = LocalVectors.allocate(NUM_PARAMETERS, torch.device("cpu"), F64, own=["control"], received=["control"])
    rows = {
        name: getattr(vectors, name).expand(3, -1).clone() for name in ("parameters", "gradient", "scratch", "constant")
    }
    several = replace(vectors, **rows)
    for each in (several.parameters, several.constant, several.gradient):
        each.copy_(torch.randn(3, NUM_PARAMETERS, generator=RNG, dtype=F64))
    start = {name: value.clone() for name, value in vars(several).items() if isinstance(value, Tensor)}
    mask = torch.zeros(3, NUM_PARAMETERS, dtype=torch.bool)
    for row, each in zip(mask, ranges, strict=True):
        for a, b in each:
            row[a:b] = True
    state = methods.optimizer.initial_state(several.parameters)
    local_step(methods, several, state, LR, active=mask)
    for place, each in enumerate(ranges):
        alone = replace(vectors, **{name: value[place].clone() for name, value in start.items() if value.dim() == 2})
        own_state = methods.optimizer.initial_state(alone.parameters)
        local_step(methods, alone, own_state, LR, each)
        torch.testing.assert_close(several.parameters[place], alone.parameters, rtol=1e-12, atol=1e-14)
        for name, value in own_state.items():
            torch.testing.assert_close(state[name][place], value, rtol=1e-12, atol=1e-14)
