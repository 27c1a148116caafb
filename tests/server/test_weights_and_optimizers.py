"""Client weights and server optimizers."""

from __future__ import annotations

import pytest
import torch

from fedspec_dist import methods
from fedspec_dist.server.optimizers import Sgd
from fedspec_dist.server.weights import samples, uniform


def test_weights_by_samples() -> None:
    assert samples(torch.tensor([1, 0, 3])).tolist() == [0.25, 0.0, 0.75]


def test_uniform_weights_ignore_samples() -> None:
    assert uniform(torch.tensor([1, 0, 3, 9])).tolist() == [0.25] * 4


@pytest.mark.parametrize("name", sorted(methods.WEIGHTS))
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_weights_are_float64_and_sum_to_one(name: str, dtype: torch.dtype) -> None:
    weights = methods.WEIGHTS[name].build(torch.tensor([1, 10, 100, 1000, 7, 3, 12], dtype=dtype))
    assert weights.dtype == torch.float64
    assert float(weights.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("counts", [[0, 0], [3, -1]])
def test_weights_by_samples_need_samples(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"server\.weights: samples needs counts >= 0 with at least one sample"):
        samples(torch.tensor(counts))


@pytest.mark.parametrize("name", sorted(methods.WEIGHTS))
def test_weights_need_clients(name: str) -> None:
    with pytest.raises(ValueError, match=r"server\.weights: the cohort has no clients"):
        methods.WEIGHTS[name].build(torch.tensor([], dtype=torch.int64))


def test_sgd_adds_the_scaled_direction_and_rounds_once() -> None:
    optimizer = Sgd(lr=0.1)
    assert isinstance(optimizer, Sgd)
    state = optimizer.initial_state(500)
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(500, generator=generator)
    direction = torch.randn(500, generator=generator, dtype=torch.float64)
    before = theta.clone()
    result = optimizer.step(theta, direction, state)
    expected = [float(t) + 0.1 * float(d) for t, d in zip(theta, direction, strict=True)]
    assert torch.equal(result, torch.tensor(expected, dtype=torch.float64).float())
    assert not torch.equal(result, theta + 0.1 * direction.float()), "rounding twice must be visible here"
    assert torch.equal(theta, before)
    assert state == {}


def test_sgd_in_slices_equals_sgd_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(1000, generator=generator)
    direction = torch.randn(1000, generator=generator, dtype=torch.float64)
    whole = Sgd(0.3).step(theta, direction, {})
    parts = [Sgd(0.3).step(theta[i : i + 333], direction[i : i + 333], {}) for i in range(0, 1000, 333)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan")])
def test_sgd_refuses_impossible_rates(lr: float) -> None:
    with pytest.raises(ValueError, match=r"server\.optimizer\.lr: must be above 0, got"):
        Sgd(lr)
