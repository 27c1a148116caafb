"""SCAFFOLD, FedDyn, FedDC, FedCM and FedNova: what is kept from round to round, on clients and server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import FedAvg, LocalAlgorithm
from fedspec_dist.clients.algorithms.controls import FedDC, Scaffold
from fedspec_dist.clients.algorithms.proximal import FedDyn, FedNova, FedProx
from fedspec_dist.clients.algorithms.sharpness import FedCM
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.config.methods import LOCAL_ALGORITHMS
from tests.clients.harness import F64, OPTIMUM, START, Federation, toy, train
from tests.reference import dense_cohort


def _close(actual: Tensor, expected: tuple[float, float], tolerance: float = 1e-12) -> None:
    assert actual.tolist() == pytest.approx(expected, abs=tolerance, rel=0)


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# --- FedAvg and FedProx


def test_fedavg_by_sizes() -> None:
    federation = Federation(FedAvg())
    federation.play(weights=(0.25, 0.75))
    _close(federation.theta, (0.6175, 1.0525))


def test_fedavg_leaves_the_optimum_for_a_biased_point() -> None:
    federation = Federation(FedAvg(), theta=OPTIMUM.clone())
    federation.play()
    _close(federation.theta, (0.2575, 0.6733333333), 1e-10)
    for _ in range(300):
        federation.play()
    _close(federation.theta, (0.2714285714, 0.6909090909), 1e-10)


def test_fedprox_with_one_step_is_fedavg_bit_for_bit() -> None:
    assert torch.equal(
        train(FedProx(mu=7.0), toy(1), START / 3, 1).parameters, train(FedAvg(), toy(1), START / 3, 1).parameters
    )


def test_fedprox_with_one_client_is_not_sgd() -> None:
    assert not torch.allclose(train(FedProx(mu=1.0), toy(1)).parameters, train(FedAvg(), toy(1)).parameters)


def test_the_pull_is_towards_the_anchor_and_not_towards_the_model_in_training() -> None:
    gradients = iter([_vector(-20.0, 0.0), _vector(0.0, 0.0)])  # out to theta + (2, 0), then the pull alone
    _close(train(FedProx(mu=1.0), lambda w: next(gradients)).parameters, (2.8, 1.0))


# --- SCAFFOLD


def test_scaffold_option_2_by_hand() -> None:
    federation = Federation(LOCAL_ALGORITHMS["scaffold"].build())
    federation.play()
    _close(federation.own[0]["control"], (0, 1.8))
    _close(federation.own[1]["control"], (2.55, -0.95))
    _close(federation.state["control"], (1.275, 0.425))
    federation.play()
    _close(federation.own[0]["control"], (-0.306, 1.7845))
    _close(federation.own[1]["control"], (2.091, -1.0995))
    _close(federation.state["control"], (0.8925, 0.3425))


def test_scaffold_option_1_by_hand() -> None:
    federation = Federation(Scaffold(option=1))
    sent = federation.play()
    assert torch.equal(sent[1].uploads["increment"], federation.own[1]["control"])  # from zero
    _close(federation.own[0]["control"], (0, 2))
    _close(federation.own[1]["control"], (3, -1))
    _close(federation.state["control"], (1.5, 0.5))
    first, second = federation.play()
    _close(first.parameters, (0.50845, 0.8556))
    _close(second.parameters, (0.62005, 0.83615))
    _close(federation.theta, (0.56425, 0.845875))
    _close(federation.own[0]["control"], (-0.255, 1.83))
    _close(federation.own[1]["control"], (2.235, -1.085))
    _close(federation.state["control"], (0.99, 0.3725))
    _close(second.uploads["increment"], (2.235 - 3, -1.085 + 1))


def test_scaffold_with_a_client_a_round() -> None:
    federation = Federation(LOCAL_ALGORITHMS["scaffold"].build())
    federation.play([0])
    _close(federation.theta, (1, 0.64))
    _close(federation.own[0]["control"], (0, 1.8))
    _close(federation.state["control"], (0, 0.9))
    absent = federation.own[0]["control"].clone()
    federation.play([1])
    _close(federation.theta, (0.49, 0.7274))
    _close(federation.own[1]["control"], (2.55, -1.337))
    _close(federation.state["control"], (1.275, 0.2315))
    assert torch.equal(federation.own[0]["control"], absent)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffolds_first_round_is_fedavg_bit_for_bit(option: int) -> None:
    ours, plain = Federation(Scaffold(option)), Federation(FedAvg())
    ours.play(num_steps=5)
    plain.play(num_steps=5)
    assert torch.equal(ours.theta, plain.theta)


def test_scaffold_with_one_client_is_fedavg_bit_for_bit() -> None:
    ours, plain = (
        Federation(method, [toy(1)], START / 3) for method in (LOCAL_ALGORITHMS["scaffold"].build(), FedAvg())
    )
    for _ in range(4):
        ours.play(num_steps=3)
        plain.play(num_steps=3)
        assert torch.equal(ours.own[0]["control"], ours.state["control"])
        assert torch.equal(ours.theta, plain.theta)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_with_one_step_of_all_clients_is_sgd(option: int) -> None:
    ours, plain = Federation(Scaffold(option)), Federation(FedAvg())
    for _ in range(4):
        ours.play(num_steps=1)
        plain.play(num_steps=1)
        torch.testing.assert_close(ours.theta, plain.theta, rtol=1e-14, atol=1e-15)


def test_scaffold_with_zero_updates_lets_the_controls_shrink() -> None:
    control, own = _vector(1.0, -2.0), _vector(0.5, 0.25)
    still = train(
        LOCAL_ALGORITHMS["scaffold"].build(),
        lambda w: own - control,
        own={"control": own},
        received={"control": control},
    )
    assert torch.equal(still.update, torch.zeros(2, dtype=F64))
    _close(still.own["control"], (-0.5, 2.25))
    state = {"control": control.clone()}
    direction = torch.zeros(2, dtype=F64)
    cohort = dense_cohort(torch.zeros(3, 2, dtype=F64), num_steps=[2, 2, 2], population=4)
    assert LOCAL_ALGORITHMS["scaffold"].build().server_step(cohort, direction, state) is direction
    _close(state["control"], (0.25, -0.5))  # times 1 - 3/4


@pytest.mark.parametrize("lr", [0.1, 0.03])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_constant_gradient_becomes_the_control(momentum: float, lr: float) -> None:
    sgd = LocalSgd(momentum=momentum)
    federation = Federation(LOCAL_ALGORITHMS["scaffold"].build(), [lambda w: _vector(3.0, -4.0)], sgd=sgd)
    federation.play(num_steps=4, lr=lr)
    _close(federation.own[0]["control"], (3, -4))
    _close(federation.state["control"], (3, -4))


def test_weight_decay_is_part_of_option_2s_controls_and_not_of_option_1s() -> None:
    for option, expected in ((2, (1.5, 1.5)), (1, (1.0, 1.0))):
        sgd = LocalSgd(weight_decay=0.5)
        kept = train(Scaffold(option), lambda w: torch.ones(2, dtype=F64), num_steps=1, sgd=sgd).own
        _close(kept["control"], expected)


# --- FedDyn


def test_feddyn_by_hand() -> None:
    federation = Federation(FedDyn(alpha=0.5))
    federation.play()
    _close(federation.own[0]["drift"], (0, -0.35))
    _close(federation.own[1]["drift"], (-0.495, 0.185))
    _close(-0.5 * federation.state["drift"], (0.12375, 0.04125))  # the paper's h
    federation.play()
    _close(federation.own[0]["drift"], (0.091575, -0.611625))
    _close(federation.own[1]["drift"], (-0.7041375, 0.3834125))
    _close(-0.5 * federation.state["drift"], (0.153140625, 0.057053125))
    _close(federation.theta, (0.1399375, 0.6892875))


def test_feddyn_with_a_client_a_round() -> None:
    federation = Federation(FedDyn(alpha=0.5))
    federation.play([0])
    _close(federation.theta, (1, 0.475))
    _close(-0.5 * federation.state["drift"], (0, 0.0875))
    (second,) = federation.play([1])
    _close(second.parameters, (0.505, 0.757125))
    _close(federation.own[1]["drift"], (-0.495, 0.282125))
    _close(-0.5 * federation.state["drift"], (0.12375, 0.01696875))
    _close(federation.theta, (0.2575, 0.7231875))
    _close(federation.own[0]["drift"], (0, -0.35))


def test_feddyns_first_round_steps_like_fedprox_bit_for_bit() -> None:
    ours = train(FedDyn(alpha=0.3), toy(1), START / 3, 5)
    assert torch.equal(ours.parameters, train(FedProx(mu=0.3), toy(1), START / 3, 5).parameters)


@pytest.mark.parametrize("method", [FedDyn, FedDC])
def test_the_first_server_step_goes_twice_as_far(method: Callable[..., LocalAlgorithm]) -> None:
    federation = Federation(method(alpha=0.5))
    first, second = federation.play()
    mean = (first.parameters + second.parameters) / 2
    torch.testing.assert_close(federation.theta, 2 * mean - START, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("method", [FedDyn, FedDC])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_shift_by_the_mean_drift_is_no_fedavg_even_without_alpha(
    method: Callable[..., LocalAlgorithm], alpha: float
) -> None:
    for gradients in ([toy(0), toy(1)], [toy(1)]):  # nor with a single client
        ours, plain = Federation(method(alpha=alpha), gradients), Federation(FedAvg(), gradients)
        ours.play()
        plain.play()
        assert not torch.allclose(ours.theta, plain.theta)


@pytest.mark.parametrize("method", [FedDyn, FedDC])
def test_zero_updates_move_the_model_by_the_mean_drift(method: Callable[..., LocalAlgorithm]) -> None:
    algorithm = method(alpha=0.5)
    state = {name: _vector(1.0, -2.0) for name in algorithm.server}
    cohort = dense_cohort(torch.zeros(2, 2, dtype=F64), population=4)
    _close(algorithm.server_step(cohort, torch.zeros(2, dtype=F64), state), (1, -2))
    _close(state["drift"], (1, -2))


# --- FedDC


def test_feddc_by_hand() -> None:
    federation = Federation(FedDC(alpha=0.5))
    federation.play()
    _close(federation.own[0]["drift"], (0, -0.35))
    _close(federation.own[1]["drift"], (-0.495, 0.185))
    _close(federation.own[0]["control"], (0, 1.75))
    _close(federation.own[1]["control"], (2.475, -0.925))
    _close(federation.state["control"], (1.2375, 0.4125))
    federation.play()
    _close(federation.own[0]["drift"], (-0.1373625, -0.3775625))
    _close(federation.own[1]["drift"], (-0.49995, 0.135975))
    _close(federation.own[0]["control"], (-0.5506875, 1.4753125))
    _close(federation.own[1]["control"], (1.26225, -1.092375))
    _close(federation.state["control"], (0.35578125, 0.19146875))
    _close(federation.theta, (0.1151875, 0.6759125))


def test_feddcs_first_round_is_feddyns_bit_for_bit() -> None:
    ours, other = Federation(FedDC(alpha=0.3)), Federation(FedDyn(alpha=0.3))
    ours.play(num_steps=4)
    other.play(num_steps=4)
    assert torch.equal(ours.theta, other.theta)
    ours.play(num_steps=4)
    other.play(num_steps=4)
    assert not torch.allclose(ours.theta, other.theta)


def test_feddc_counts_plain_steps() -> None:
    assert FedDyn(alpha=1.0).effective_steps(2, 0.1, 0.0) == pytest.approx(1.9)
    assert FedDC(alpha=1.0).effective_steps(2, 0.1, 0.0) == 2
    assert FedDyn(alpha=1.0).proximal
    assert not FedDC(alpha=1.0).proximal


# --- What all methods with memory have in common


@pytest.mark.parametrize(
    "algorithm",
    [
        LOCAL_ALGORITHMS["scaffold"].build(),
        LOCAL_ALGORITHMS["scaffold"].build(option=1),
        FedDyn(alpha=0.5),
        FedDC(alpha=0.5),
    ],
    ids=lambda a: type(a).__name__,
)
def test_the_common_optimum_is_reached(algorithm: LocalAlgorithm) -> None:
    federation = Federation(algorithm)
    for _ in range(300):
        federation.play()
    _close(federation.theta, (0.25, 2 / 3), 1e-10)


# Optimum (0.25, 1), so that every number of the fixed point has few binary digits.
CONSISTENT = [
    lambda w: _vector(1, 2) * (w - _vector(1, 0)),
    lambda w: _vector(3, 2) * (w - _vector(0, 2)),
]
AT_OPTIMUM = [_vector(-0.75, 2.0), _vector(0.75, -2.0)]


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        (LOCAL_ALGORITHMS["scaffold"].build(), {"control": 1.0}),
        (Scaffold(option=1), {"control": 1.0}),
        (FedDyn(alpha=0.5), {"drift": -2.0}),
        (FedDC(alpha=0.5), {"control": 1.0}),
        (FedDC(alpha=0.5), {"drift": -2.0}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LocalAlgorithm) else "-".join(value),
)
def test_the_optimum_with_its_state_stays_exactly(algorithm: LocalAlgorithm, own: dict[str, float]) -> None:
    federation = Federation(algorithm, CONSISTENT, _vector(0.25, 1.0))
    for k, gradient in enumerate(AT_OPTIMUM):
        for name, factor in own.items():
            federation.own[k][name] = factor * gradient
    kept = [dict(state) for state in federation.own]
    for participants in ([0, 1], [0, 1], [0], [1]):
        federation.play(participants, num_steps=3)
        assert torch.equal(federation.theta, _vector(0.25, 1.0))
        assert all(torch.equal(vector, torch.zeros(2, dtype=F64)) for vector in federation.state.values())
        for now, before in zip(federation.own, kept, strict=True):
            assert all(torch.equal(now[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "algorithm",
    [
        LOCAL_ALGORITHMS["scaffold"].build(),
        LOCAL_ALGORITHMS["scaffold"].build(option=1),
        FedDyn(alpha=0.5),
        FedDC(alpha=0.5),
    ],
    ids=lambda a: type(a).__name__,
)
def test_the_server_keeps_the_mean_over_all_clients(algorithm: LocalAlgorithm) -> None:
    """Whoever takes part, with different numbers of steps, weights and a falling learning rate."""
    draw = torch.Generator().manual_seed(7)
    curvatures = torch.rand(5, 3, generator=draw, dtype=F64) + 0.5
    centres = torch.randn(5, 3, generator=draw, dtype=F64)
    gradients = [lambda w, k=k: curvatures[k] * (w - centres[k]) for k in range(5)]
    sgd = LocalSgd(weight_decay=0.01, clip_norm=1.0)
    federation = Federation(algorithm, gradients, torch.zeros(3, dtype=F64), sgd)
    rounds = [
        ([0, 1, 2], [1, 2, 3]),
        ([1, 4], [5, 1]),
        ([3], [2]),
        ([0, 1, 2, 3, 4], [1, 1, 4, 2, 3]),
        ([2, 3], [3, 3]),
    ]
    for number, (participants, steps) in enumerate(rounds):
        weights = torch.rand(len(participants), generator=draw, dtype=F64)
        federation.play(participants, num_steps=steps, lr=0.1 * 0.9**number, weights=(weights / weights.sum()).tolist())
        for name, kept in federation.state.items():
            mean = sum(own[name] for own in federation.own) / 5
            torch.testing.assert_close(kept, mean, rtol=1e-12, atol=1e-13)
            assert kept.abs().min() > 0


def test_float32_state_is_rounded_once() -> None:
    cohort = dense_cohort(torch.tensor([[0.1, 0.2], [0.3, -0.7]], dtype=F64), num_steps=[2, 3], population=7)
    for algorithm in (
        LOCAL_ALGORITHMS["scaffold"].build(),
        LOCAL_ALGORITHMS["feddyn"].build(),
        LOCAL_ALGORITHMS["feddc"].build(),
        LOCAL_ALGORITHMS["fedcm"].build(),
    ):
        exact = {name: _vector(1 / 3, -2 / 7).float().double() for name in algorithm.server}
        rounded = {name: vector.float() for name, vector in exact.items()}
        direction = _vector(1.0, 2.0)
        expected = algorithm.server_step(cohort, direction, exact)
        assert torch.equal(algorithm.server_step(cohort, direction, rounded), expected)
        assert torch.equal(direction, _vector(1.0, 2.0))
        for name, vector in exact.items():
            assert torch.equal(rounded[name], vector.float())


# --- FedCM


def test_fedcm_by_hand() -> None:
    federation = Federation(FedCM(alpha=0.5))
    federation.play()
    _close(federation.state["momentum"], (0.69375, 0.23125))
    federation.play()
    _close(federation.state["momentum"], (0.893203125, 0.309296875))


def test_fedcms_first_round_is_fedavg_with_a_smaller_step() -> None:
    ours = train(FedCM(alpha=0.25), toy(1), lr=0.1).parameters
    torch.testing.assert_close(ours, train(FedAvg(), toy(1), lr=0.025).parameters, rtol=1e-14, atol=0)


def test_fedcm_with_one_step_averages_exponentially() -> None:
    federation = Federation(FedCM(alpha=0.3))
    momentum = torch.zeros(2, dtype=F64)
    for _ in range(5):
        mean_gradient = (toy(0)(federation.theta) + toy(1)(federation.theta)) / 2
        momentum = 0.3 * mean_gradient + 0.7 * momentum
        federation.play(num_steps=1)
        torch.testing.assert_close(federation.state["momentum"], momentum, rtol=1e-12, atol=1e-14)


def test_fedcms_momentum_divides_by_each_clients_own_steps() -> None:
    updates = torch.tensor([[-0.2, 0.0], [0.0, -0.6]], dtype=F64)
    cohort = dense_cohort(updates, num_steps=[2, 4], lr=0.1, weights=(0.25, 0.75))
    state = {"momentum": _vector(9.0, 9.0)}
    FedCM(alpha=0.5).server_step(cohort, torch.zeros(2, dtype=F64), state)
    _close(state["momentum"], (0.25, 1.125))
    FedCM(alpha=0.5).server_step(dense_cohort(0 * updates), torch.zeros(2, dtype=F64), state)
    assert torch.equal(state["momentum"], torch.zeros(2, dtype=F64))


def test_scaffolds_control_is_fedcms_momentum_when_all_take_part() -> None:
    updates = torch.randn(4, 6, generator=torch.Generator().manual_seed(8), dtype=F64)
    cohort = dense_cohort(updates, num_steps=[1, 2, 3, 4], lr=0.05)
    states = [{name: torch.ones(6, dtype=F64)} for name in ("control", "momentum")]
    for algorithm, state in zip((LOCAL_ALGORITHMS["scaffold"].build(), FedCM(alpha=0.5)), states, strict=True):
        algorithm.server_step(cohort, torch.zeros(6, dtype=F64), state)
    torch.testing.assert_close(states[0]["control"], states[1]["momentum"], rtol=1e-13, atol=1e-15)


# --- FedNova's local half


@pytest.mark.parametrize(
    ("mu", "momentum", "expected"),
    [
        (0.0, 0.0, (1, 2, 3, 4)),
        (0.0, 0.9, (1, 2.9, 5.61, 9.049)),
        (1.0, 0.0, (1, 1.9, 2.71, 3.439)),
    ],
)
def test_effective_steps_by_hand_and_by_a_constant_gradient(
    mu: float, momentum: float, expected: tuple[float, ...]
) -> None:
    for num_steps, steps in enumerate(expected, start=1):
        assert FedNova(mu).effective_steps(num_steps, 0.1, momentum) == pytest.approx(steps, rel=1e-12)
        went = train(FedNova(mu), lambda w: _vector(1.0, 0.0), num_steps=num_steps, sgd=LocalSgd(momentum)).update
        _close(went, (-0.1 * steps, 0))


def test_fednova_is_proximal_only_with_mu() -> None:
    assert FedNova(mu=0.1).proximal
    assert not LOCAL_ALGORITHMS["fednova"].build().proximal
