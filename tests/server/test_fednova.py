"""FedNova's worked numbers and the clients that it drops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.aggregators.means import FedNova
from fedspec_dist.server.optimizers import Momentum
from tests.reference import dense_cohort

# Two clients with constant gradients (1, 0) and (0, 1), rate 0.1, after 2 and 4 steps.
UPDATES = torch.tensor([[-0.2, 0], [0, -0.4]], dtype=torch.float64)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def direction(cohort: Cohort) -> Direction:
    return FedNova().direction(cohort)


@pytest.mark.parametrize(
    ("weights", "tau", "expected"), [([0.5, 0.5], 3.0, (-0.15, -0.15)), ([0.25, 0.75], 3.5, (-0.0875, -0.2625))]
)
def test_constant_gradients(weights: list[float], tau: float, expected: tuple[float, float]) -> None:
    result = direction(dense_cohort(UPDATES, weights=weights, num_steps=[2, 4]))
    torch.testing.assert_close(result.slice, tensor(*expected))
    assert result.diagnostics == {"fednova/effective_steps": tau}


def test_effective_steps_count_and_not_steps() -> None:
    # Momentum 0.9: 2 and 4 steps count as 2.9 and 9.049.
    cohort = dense_cohort(UPDATES, weights=[0.5, 0.5], num_steps=[2, 4], effective_steps=[2.9, 9.049])
    tau = (2.9 + 9.049) / 2
    torch.testing.assert_close(direction(cohort).slice, tau / 2 * tensor(-0.2 / 2.9, -0.4 / 9.049))


def test_under_a_proximal_term_the_mean_is_of_steps() -> None:
    # lr * mu = 0.1: 2 and 4 steps count as 1.9 and 3.439, while the model moves for 3 whole ones.
    cohort = dense_cohort(UPDATES, weights=[0.5, 0.5], num_steps=[2, 4], effective_steps=[1.9, 3.439])
    cohort = replace(cohort, clients=replace(cohort.clients, proximal=True))
    result = direction(cohort)
    torch.testing.assert_close(result.slice, 3 / 2 * tensor(-0.2 / 1.9, -0.4 / 3.439))
    assert result.diagnostics["fednova/effective_steps"] == 3.0


def test_one_client_under_a_proximal_term_is_not_fedavg() -> None:
    cohort = dense_cohort(UPDATES[:1], num_steps=[2], effective_steps=[1.9])
    cohort = replace(cohort, clients=replace(cohort.clients, proximal=True))
    torch.testing.assert_close(direction(cohort).slice, 2 / 1.9 * UPDATES[0])


def test_weights_go_by_place_in_the_cohort_and_not_by_client() -> None:
    cohort = dense_cohort(UPDATES, weights=[0.25, 0.75], num_steps=[2, 4], ids=[9, 7], population=20)
    torch.testing.assert_close(direction(cohort).slice, tensor(-0.0875, -0.2625))


def test_a_client_without_steps_is_as_if_it_were_not_there() -> None:
    three = torch.cat([UPDATES, torch.ones(1, 2, dtype=torch.float64)])
    cohort = dense_cohort(three, weights=[0.125, 0.375, 0.5], num_steps=[2, 4, 0])
    torch.testing.assert_close(direction(cohort).slice, tensor(-0.0875, -0.2625))


def test_nobody_made_a_step() -> None:
    result = direction(dense_cohort(UPDATES, num_steps=[0, 0]))
    assert not result.slice.any()
    assert result.diagnostics == {"fednova/effective_steps": 0.0}


@pytest.mark.parametrize(("decay", "is_momentum"), [(1.0, True), (0.5, False)])
def test_the_released_server_momentum_is_ours_while_the_rate_stays(decay: float, is_momentum: bool) -> None:
    """`v <- gmf v + d / lr`, `theta + lr v`, with the local rate of the round."""
    optimizer = Momentum(lr=1.0, beta=0.9)
    ours, released, buffer = tensor(0, 0), tensor(0, 0), tensor(0, 0)
    state = optimizer.initial_state(2)
    for number in range(3):
        lr, d = 0.1 * decay**number, tensor(1.0 + number, -2.0)
        ours = optimizer.step(ours, d, state)
        buffer = 0.9 * buffer + d / lr
        released = released + lr * buffer
    assert torch.allclose(ours, released, rtol=1e-12, atol=0) == is_momentum
