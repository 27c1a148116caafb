"""Gradient centralization: the worked numbers, and which tensors it leaves."""

from __future__ import annotations

import torch

from fedspec_dist.core.parameters import Segment
from fedspec_dist.filters.centralization import GradientCentralization, centralized
from tests.filters.layers import random_gradient, segments


def test_worked_numbers() -> None:
    gradient = torch.tensor([[1.0, 3], [2, 6]])
    assert torch.equal(centralized(gradient), torch.tensor([[-1.0, 1], [-2, 2]]))


def test_every_output_unit_loses_its_mean_and_vectors_keep_theirs() -> None:
    gradient = random_gradient()
    result = gradient.clone()
    GradientCentralization(segments())(result)
    for layer in segments():
        before, after = (vector[layer.start : layer.stop].view(layer.shape) for vector in (gradient, result))
        if len(layer.shape) == 1:
            assert torch.equal(before, after)
        else:
            means = before.mean(tuple(range(1, before.dim())), keepdim=True)
            torch.testing.assert_close(after, before - means, rtol=0, atol=1e-14)


def test_a_unit_of_one_input_is_left_with_nothing() -> None:
    gradient = torch.tensor([1.0, 2, 3])
    GradientCentralization([Segment("linear", (3, 1), 0, 3)])(gradient)
    assert not gradient.any()
