"""The end of a local step, against torch's optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import FedAvg
from fedspec_dist.clients.optimizers import LocalAdam, LocalAdamW, LocalOptimizer, LocalSgd
from fedspec_dist.clients.step import LocalMethods, local_step
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.filters.identity import Identity
from tests.clients.harness import F64, START, toy, train

OPTIMIZERS = {
    "sgd": (LocalSgd, torch.optim.SGD, {}),
    "momentum": (partial(LocalSgd, momentum=0.9), partial(torch.optim.SGD, momentum=0.9), {}),
    "adam": (LocalAdam, torch.optim.Adam, {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}),
    "adamw": (LocalAdamW, torch.optim.AdamW, {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}),
}


def _vectors(parameters: Tensor, gradient: Tensor) -> LocalVectors:
    vectors = LocalVectors.allocate(len(parameters), parameters.device, F64)
    vectors.parameters.copy_(parameters)
    vectors.gradient.copy_(gradient)
    return vectors


def _step(optimizer: LocalOptimizer, vectors: LocalVectors, lr: float) -> None:
    local_step(LocalMethods(Identity(), FedAvg(), optimizer), vectors, optimizer.initial_state(vectors.parameters), lr)


def test_clipping_then_weight_decay_by_hand() -> None:
    vectors = _vectors(torch.tensor([1.0, -1.0], dtype=F64), torch.tensor([30.0, 40.0], dtype=F64))
    _step(LocalSgd(weight_decay=1e-3, clip_norm=10.0), vectors, 0.1)
    assert vectors.parameters.tolist() == pytest.approx([0.399900012, -1.799899984], abs=1e-9)


def test_a_small_gradient_is_not_clipped() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=F64)
    vectors = _vectors(torch.zeros(2, dtype=F64), gradient)
    _step(LocalSgd(clip_norm=10.0), vectors, 1.0)
    assert torch.equal(vectors.parameters, -gradient)


def _torch_run(name: str, weight_decay: float, clip_norm: float | None, trained: Sequence[bool]) -> Tensor:
    """Six steps on a toy client; in those where `trained` is False the second entry has no gradient."""
    _, theirs, settings = OPTIMIZERS[name]
    parameters = [torch.nn.Parameter(part.clone()) for part in START.split(1)]
    betas = {"betas": (settings["beta1"], settings["beta2"]), "eps": settings["epsilon"]} if settings else {}
    optimizer = theirs(parameters, lr=0.1, weight_decay=weight_decay, **betas)
    for both in trained:
        gradient = toy(0)(torch.cat([p.detach() for p in parameters])) * 3
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient[number : number + 1].clone() if both or number == 0 else None
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    return torch.cat([p.detach() for p in parameters])


@pytest.mark.parametrize(("weight_decay", "clip_norm"), [(0.0, None), (5e-4, None), (0.1, 1.0)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_torchs(name: str, weight_decay: float, clip_norm: float | None) -> None:
    ours, _, settings = OPTIMIZERS[name]
    made = ours(weight_decay=weight_decay, clip_norm=clip_norm, **settings)
    for num_clients in (None, 3):
        found = train(FedAvg(), lambda w: toy(0)(w) * 3, START, 6, sgd=made, num_clients=num_clients).parameters
        expected = _torch_run(name, weight_decay, clip_norm, [True] * 6)
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_does_not_train_in_a_step_is_as_if_it_had_no_gradient(name: str) -> None:
    ours, _, settings = OPTIMIZERS[name]
    made = ours(weight_decay=0.1, clip_norm=1.0, **settings)
    vectors = _vectors(START, torch.zeros(2, dtype=F64))
    state, trained = made.initial_state(vectors.parameters), [True, False, False, True, False, True]
    for both in trained:
        vectors.gradient.copy_(toy(0)(vectors.parameters) * 3)
        methods = LocalMethods(Identity(), FedAvg(), made)
        local_step(methods, vectors, state, 0.1, ranges=None if both else [(0, 1)])
    torch.testing.assert_close(vectors.parameters, _torch_run(name, 0.1, 1.0, trained), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clients_that_are_done_stay_where_they_are(name: str) -> None:
    ours, _, settings = OPTIMIZERS[name]
    made = ours(weight_decay=0.1, clip_norm=1.0, **settings)
    methods, steps = LocalMethods(Identity(), FedAvg(), made), [2, 0, 5]
    zeros = torch.zeros(3, 2, dtype=F64)
    vectors = LocalVectors(START.expand(3, 2).clone(), zeros.clone(), START, zeros.clone(), zeros.clone())
    state = made.initial_state(vectors.parameters)
    for step in range(5):
        vectors.gradient.copy_(toy(0)(vectors.parameters) * 3)
        local_step(methods, vectors, state, 0.1, active=torch.tensor([[step < count] for count in steps]))
    expected = [_torch_run(name, 0.1, 1.0, [True] * count) for count in steps]
    torch.testing.assert_close(vectors.parameters, torch.stack(expected), rtol=1e-12, atol=1e-14)
