"""The end of a local step: clip, weight decay, momentum, step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.fedavg import FedAvg
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.vectors import LocalVectors
from tests.clients.harness import F64, START, toy, train


def _vectors(parameters: Tensor, gradient: Tensor) -> LocalVectors:
    vectors = LocalVectors.allocate(len(parameters), parameters.device, F64)
    vectors.parameters.copy_(parameters)
    vectors.gradient.copy_(gradient)
    return vectors


def test_clipping_then_weight_decay_by_hand() -> None:
    vectors = _vectors(torch.tensor([1.0, -1.0], dtype=F64), torch.tensor([30.0, 40.0], dtype=F64))
    LocalSgd(weight_decay=1e-3, clip_norm=10.0).step(vectors, None, 0.1)
    assert vectors.parameters.tolist() == pytest.approx([0.399900012, -1.799899984], abs=1e-9)


def test_a_small_gradient_is_not_clipped() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=F64)
    vectors = _vectors(torch.zeros(2, dtype=F64), gradient)
    LocalSgd(clip_norm=10.0).step(vectors, None, 1.0)
    assert torch.equal(vectors.parameters, -gradient)


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "clip_norm"), [(0.0, 0.0, None), (0.9, 5e-4, None), (0.5, 0.1, 1.0)]
)
def test_the_step_is_torchs_sgd(momentum: float, weight_decay: float, clip_norm: float | None) -> None:
    parameter = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for _ in range(6):
        parameter.grad = toy(0)(parameter.detach()) * 3
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
        optimizer.step()
    sgd = LocalSgd(momentum, weight_decay, clip_norm)
    ours = train(FedAvg(), lambda w: toy(0)(w) * 3, START, 6, sgd=sgd).parameters
    torch.testing.assert_close(ours, parameter.detach(), rtol=1e-12, atol=1e-14)
