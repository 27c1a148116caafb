"""FedAWA's worked numbers, its memory by client, and rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import WEIGHTS
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.weights.fedawa import ClientVectors, FedAwa
from tests.reference import adam_steps, dense_cohort, fedawa_loss

UPDATES = torch.tensor([[0.3, 0.4], [0, -0.5]], dtype=torch.float64)
THETA = torch.ones(2, dtype=torch.float64)
SIZES = [10, 30]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def cohort() -> Cohort:
    return dense_cohort(UPDATES, THETA, num_samples=SIZES)


def state(weighting: FedAwa) -> dict[str, Tensor]:
    return weighting.initial_state(torch.tensor(SIZES))


def test_loss_and_gradient() -> None:
    logits = tensor(0.25, 0.75).requires_grad_()
    cosine, distance = ClientVectors.of(cohort()).losses(logits.softmax(0))
    assert (cosine.item(), distance.item()) == pytest.approx((0.0322012381, 0.4458881935), abs=1e-9)
    (cosine + distance).backward()
    close(logits.grad, tensor(0.0973077411, -0.0973077411))


@pytest.mark.parametrize(
    ("parameters", "logits"),
    [({"optimizer": "sgd", "weight_decay": 0.0}, (0.2490269226, 0.7509730774)), ({}, (0.249, 0.751))],
)
def test_as_released_one_step_counts_in_the_next_round(
    parameters: dict[str, object], logits: tuple[float, float]
) -> None:
    weighting = WEIGHTS["fedawa"].build(**parameters, stale=True)
    kept = state(weighting)
    weights = weighting.weigh(cohort(), kept)
    close(THETA + weights.values @ UPDATES, tensor(1.1132622006, 0.8397866019))
    close(kept["logits"], tensor(*logits))
    assert weights.diagnostics["fedawa/cosine_loss"] == pytest.approx(0.0322012381, abs=1e-9)
    assert weights.diagnostics["fedawa/distance_loss"] == pytest.approx(0.4458881935, abs=1e-9)
    second = weighting.weigh(cohort(), kept)
    close(second.values, tensor(*logits).softmax(0))


def test_one_step_counts_in_its_own_round() -> None:
    weights = WEIGHTS["fedawa"].build().weigh(cohort(), state(WEIGHTS["fedawa"].build()))
    close(weights.values, tensor(0.249, 0.751).softmax(0))


@pytest.mark.parametrize(
    ("optimizer", "released"),
    [("adam", {"lr": 0.001, "weight_decay": 0.0}), ("sgd", {"lr": 0.01, "weight_decay": 5e-4})],
)
def test_rates_that_are_not_given_are_the_released_ones_of_the_optimizer(
    optimizer: str, released: dict[str, float]
) -> None:
    def learned(**parameters: float | None) -> Tensor:
        weighting = WEIGHTS["fedawa"].build(optimizer, **parameters, server_epochs=3)
        kept = state(weighting)
        weighting.weigh(cohort(), kept)
        return kept["logits"]

    assert torch.equal(learned(), learned(**released))
    assert torch.equal(learned(lr=None, weight_decay=None), learned(**released))
    for key, value in released.items():
        assert not torch.equal(learned(), learned(**{key: 2 * value + 0.01})), key


def test_zero_epochs_are_the_softmax_of_the_shares_and_not_the_shares() -> None:
    weighting = WEIGHTS["fedawa"].build(server_epochs=0)
    kept = state(weighting)
    close(weighting.weigh(cohort(), kept).values, tensor(0.3775406688, 0.6224593312))
    assert torch.equal(kept["logits"], tensor(0.25, 0.75))


def test_equal_sizes_start_uniform() -> None:
    weighting = WEIGHTS["fedawa"].build(server_epochs=0)
    weights = weighting.weigh(cohort(), weighting.initial_state(torch.tensor([5, 5])))
    assert weights.values.tolist() == [0.5, 0.5]


def random_cohort(num_clients: int, seed: int, ids: list[int] | None = None, population: int | None = None) -> Cohort:
    generator = torch.Generator().manual_seed(seed)
    updates = torch.randn(num_clients, 20, generator=generator, dtype=torch.float64)
    theta = torch.randn(20, generator=generator, dtype=torch.float64)
    return dense_cohort(updates, theta, ids=ids, population=population)


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("stale", [True, False])
def test_adam_equals_its_twin_in_two_rounds(epochs: int, stale: bool) -> None:
    weighting = WEIGHTS["fedawa"].build(lr=0.1, server_epochs=epochs, stale=stale)
    sizes = torch.tensor([3, 9, 4, 4])
    kept, logits = weighting.initial_state(sizes), sizes.double() / 20
    for seed in range(2):
        given = random_cohort(4, seed)
        weights = weighting.weigh(given, kept)
        rows, theta = given.updates.rows, given.theta
        history = adam_steps([logits], lambda v, _, r=rows, t=theta: fedawa_loss(v[0], r, t), [0.1] * epochs)
        logits = history[-1][0]
        close(kept["logits"], logits)
        close(weights.values, history[-2 if stale else -1][0].softmax(0))


@pytest.mark.parametrize("weight_decay", [0.0, 5e-2])
def test_sgd_equals_its_twin(weight_decay: float) -> None:
    weighting = WEIGHTS["fedawa"].build(optimizer="sgd", lr=0.3, server_epochs=3, weight_decay=weight_decay)
    kept = weighting.initial_state(torch.tensor([3, 9, 4, 4]))
    given = random_cohort(4, 0)
    logits, buffer = kept["logits"].clone(), torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        free = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(fedawa_loss(free, given.updates.rows, given.theta), free)
        buffer = 0.9 * buffer + gradient + weight_decay * logits
        logits = logits - 0.3 * buffer
    weighting.weigh(given, kept)
    close(kept["logits"], logits)


def test_logits_belong_to_clients_and_not_to_places() -> None:
    weighting = WEIGHTS["fedawa"].build(lr=0.1, stale=True)
    kept = weighting.initial_state(torch.tensor([1, 2, 3, 4]))
    start = kept["logits"].clone()
    first = weighting.weigh(random_cohort(2, 0, [1, 3], 4), kept)
    close(first.values, tensor(0.2, 0.4).softmax(0))
    assert torch.equal(kept["logits"][[0, 2]], start[[0, 2]]), "who was not there keeps its logit"
    learned = kept["logits"][3].clone()
    assert learned != start[3]
    second = weighting.weigh(random_cohort(2, 1, [2, 3], 4), kept)
    close(second.values, torch.stack([start[2], learned]).softmax(0))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_equal_updates_teach_nothing(optimizer: str, scale: float) -> None:
    # The rounding of a Gram matrix must not become a direction: Adam would step its full rate along it.
    weighting = WEIGHTS["fedawa"].build(optimizer=optimizer, weight_decay=0.0, server_epochs=5)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        update = scale * torch.randn(1, 1000, generator=generator, dtype=torch.float64)
        theta = torch.randn(1000, generator=generator, dtype=torch.float64)
        kept = weighting.initial_state(torch.tensor([3, 9, 4, 4, 2]))
        before = kept["logits"].clone()
        weighting.weigh(dense_cohort(update.expand(5, -1).clone(), theta), kept)
        close(kept["logits"], before, 1e-8)


def test_one_client_and_zero_updates_teach_nothing() -> None:
    weighting = WEIGHTS["fedawa"].build(server_epochs=3)
    for updates in (UPDATES[:1], torch.zeros(2, 2, dtype=torch.float64)):
        kept = weighting.initial_state(torch.tensor([2, 6][: len(updates)]))
        before = kept["logits"].clone()
        weighting.weigh(dense_cohort(updates, THETA), kept)
        close(kept["logits"], before, 1e-10)


def test_a_model_of_zeros_has_no_angle() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    cosine, _ = ClientVectors.of(dense_cohort(UPDATES, zero)).losses(tensor(0.5, 0.5))
    assert float(cosine) == 1.0
