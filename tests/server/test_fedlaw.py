"""FedLAW's worked numbers, and its gradients against those of automatic differentiation."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import WEIGHTS
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.weights.fedlaw import gradients, merged
from tests.reference import adam_steps, dense_cohort, fedlaw_model
from tests.server.test_weightings import Hills

MODELS = torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64)
THETA = torch.tensor([0.2, -0.7], dtype=torch.float64)
SHARES = torch.tensor([0.25, 0.75], dtype=torch.float64)


class Parabola:
    """`||w - (1, 1)||^2 / 2`, in one batch."""

    def batches(self, epoch: int) -> Sequence[Tensor]:
        return [torch.tensor([0])]

    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        return theta - 1


def cohort() -> Cohort:
    return dense_cohort(MODELS - THETA, THETA, num_samples=[1, 3], proxy=Parabola())


def close(left: Tensor, right: Sequence[float], tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, torch.tensor(right, dtype=torch.float64), rtol=0, atol=tolerance)


def test_first_gradients() -> None:
    model = merged(cohort(), SHARES, 1.0)
    close(model, [0.625, 0.875])
    along_x, along_g = gradients(cohort(), SHARES, 1.0, model - 1)
    close(along_x, [-0.0234375, 0.0234375])
    assert float(along_g) == pytest.approx(-0.34375)


def test_one_step() -> None:
    weights = WEIGHTS["fedlaw"].build(epochs=1).weigh(cohort(), {})
    close(weights.values, [0.253768718, 0.746231282], 1e-7)  # Adam's epsilon is not in the worked numbers
    assert weights.shrink == pytest.approx(1.0100501671, abs=1e-9)
    assert weights.diagnostics == {"fedlaw/shrink": weights.shrink}
    close(merged(cohort(), weights.values, weights.shrink), [0.6331846515, 0.8818905991], 1e-7)


def test_optimum() -> None:
    weights = WEIGHTS["fedlaw"].build(epochs=200, lr=0.1).weigh(cohort(), {})
    close(weights.values, [0.5, 0.5], 1e-3)
    assert weights.shrink == pytest.approx(4 / 3, abs=1e-3)


def test_without_epochs_exactly_the_shares() -> None:
    sizes = list(range(1, 14))
    given = dense_cohort(torch.ones(13, 2), num_samples=sizes)
    weights = WEIGHTS["fedlaw"].build(epochs=0).weigh(given, {})
    assert torch.equal(weights.values, given.clients.shares)
    assert not torch.equal(given.clients.shares.log().softmax(0), given.clients.shares), "the test would see rounding"
    assert weights.shrink == 1.0


def test_one_client_learns_the_factor_only() -> None:
    given = dense_cohort(MODELS[:1] - THETA, THETA, proxy=Parabola())
    weights = WEIGHTS["fedlaw"].build().weigh(given, {})
    assert weights.values.tolist() == [1.0]
    assert weights.shrink > 1.1


@pytest.mark.parametrize("epochs", [1, 3, 45])
def test_equals_automatic_differentiation(epochs: int) -> None:
    generator = torch.Generator().manual_seed(2)
    updates = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    theta = torch.randn(30, generator=generator, dtype=torch.float64)
    proxy = Hills()
    sizes = [3, 9, 4, 4]
    weights = (
        WEIGHTS["fedlaw"]
        .build(epochs=epochs, lr=0.05)
        .weigh(dense_cohort(updates, theta, num_samples=sizes, proxy=proxy), {})
    )
    batches = [batch for epoch in range(epochs) for batch in proxy.batches(epoch)]
    x = torch.tensor([log(size / 20) for size in sizes], dtype=torch.float64)
    history = adam_steps(
        [x, torch.zeros((), dtype=torch.float64)],
        lambda values, step: proxy.loss(fedlaw_model(*values, updates, theta), batches[step]),
        [0.05 * 0.5 ** (epoch // 20) for epoch in range(epochs) for _ in proxy.batches(epoch)],
    )
    x, g = history[-1]
    torch.testing.assert_close(weights.values, torch.softmax(x, 0), rtol=1e-9, atol=1e-9)
    assert weights.shrink == pytest.approx(float(g.exp()), abs=1e-9)


def test_a_client_without_samples_stays_without_weight() -> None:
    given = dense_cohort(MODELS - THETA, THETA, num_samples=[0, 3], proxy=Parabola())
    assert WEIGHTS["fedlaw"].build(epochs=5).weigh(given, {}).values.tolist() == [0.0, 1.0]


def test_the_proxy_is_asked_at_the_precision_of_the_model() -> None:
    asked = []

    class Recorder(Parabola):
        def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
            asked.append(theta)
            return theta - 1

    WEIGHTS["fedlaw"].build(epochs=2).weigh(dense_cohort(MODELS, THETA.float(), proxy=Recorder()), {})
    assert [(theta.dtype, theta.shape) for theta in asked] == [(torch.float32, (2,))] * 2


def test_samples_of_the_servers_own_are_needed() -> None:
    with pytest.raises(AssertionError, match="fedlaw needs samples of the server's own"):
        WEIGHTS["fedlaw"].build().weigh(dense_cohort(MODELS, THETA), {})
