"""Server optimizers: the worked numbers, and what all of them have to satisfy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import SERVER_OPTIMIZERS
from fedspec_dist.server.optimizers import Adam, Momentum, Sgd
from fedspec_dist.server.protocols import ServerOptimizer
from tests.reference import adaptive_step

FIRST, SECOND = (-0.255, -0.085), (-0.1, 0.2)
every_optimizer = pytest.mark.parametrize("name", sorted(SERVER_OPTIMIZERS))


def tensor(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def two_rounds(optimizer: ServerOptimizer) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The parameters after each of two rounds from (1, 1), and the state."""
    state = optimizer.initial_state(2)
    one = optimizer.step(torch.ones(2, dtype=torch.float64), tensor(FIRST), state)
    return one, optimizer.step(one, tensor(SECOND), state), state


def test_momentum() -> None:
    one, two, state = two_rounds(Momentum(lr=1.0, beta=0.9))
    torch.testing.assert_close(one, tensor((0.745, 0.915)))
    torch.testing.assert_close(two, tensor((0.4155, 1.0385)))
    torch.testing.assert_close(state["momentum"], tensor((-0.3295, 0.1235)))


ADAPTIVE = ["adagrad", "adam", "yogi"]


@pytest.mark.parametrize(
    ("name", "start", "one", "two"),
    [
        ("adagrad", 0.0, (0.9900390625, 0.9901162791), (0.9780531874, 0.9957732909)),
        ("adagrad", 1e-6, (0.9900391388, 0.990116955), (0.9780533432, 0.9957739072)),
        ("adam", 0.0, (0.9037735849, 0.9105263158), (0.7872260839, 0.9648964317)),
        ("adam", 1e-6, (0.9038439943, 0.9110696071), (0.7873704979, 0.9653857863)),
        ("yogi", 0.0, (0.9037735849, 0.9105263158), (0.7877144195, 0.9648566554)),
        ("yogi", 1e-6, (0.9038447047, 0.9110750425), (0.7878600892, 0.9653504745)),
    ],
)
def test_adaptive(name: str, start: float, one: tuple[float, float], two: tuple[float, float]) -> None:
    settings = {"lr": 0.1, "beta1": 0.9, "tau": 1e-3}
    for accumulator in (start, None) if start else (start,):  # None is tau^2
        first, second, _ = two_rounds(SERVER_OPTIMIZERS[name].build(**settings, initial_accumulator=accumulator))
        torch.testing.assert_close(first, tensor(one), rtol=0, atol=1e-9)
        torch.testing.assert_close(second, tensor(two), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_equal_their_twin(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = SERVER_OPTIMIZERS[name].build(
        lr=0.3, beta1=0.7, tau=0.05, **({} if name == "adagrad" else {"beta2": 0.6})
    )
    theta = torch.randn(20, generator=generator, dtype=torch.float64)
    state, expected = optimizer.initial_state(20), [(t, 0.0, 0.05**2) for t in theta.tolist()]
    for _ in range(4):
        direction = torch.randn(20, generator=generator, dtype=torch.float64)
        theta = optimizer.step(theta, direction, state)
        expected = [
            adaptive_step(name, t, d, m, v, lr=0.3, beta1=0.7, beta2=0.6, tau=0.05)
            for (t, m, v), d in zip(expected, direction.tolist(), strict=True)
        ]
    torch.testing.assert_close(torch.stack([theta, state["mean"], state["square"]]).T, tensor(expected))


def test_the_default_start_is_tau_squared() -> None:
    for optimizer in (
        SERVER_OPTIMIZERS["adagrad"].build(),
        SERVER_OPTIMIZERS["adam"].build(),
        SERVER_OPTIMIZERS["yogi"].build(tau=0.5),
    ):
        assert torch.equal(optimizer.initial_state(3)["square"], tensor((optimizer.tau**2,) * 3))


def test_momentum_without_memory_is_fedavg_bit_for_bit() -> None:
    for lr in (1.0, 0.3):
        for mine, sgd in zip(two_rounds(Momentum(lr, beta=0.0)), two_rounds(Sgd(lr)), strict=False):
            if isinstance(sgd, Tensor):
                assert torch.equal(mine, sgd)


def test_no_adaptive_optimizer_is_fedavg_except_one_setting_of_adam() -> None:
    fedavg = two_rounds(SERVER_OPTIMIZERS["sgd"].build())
    for optimizer in (
        SERVER_OPTIMIZERS["adagrad"].build(),
        SERVER_OPTIMIZERS["adam"].build(),
        SERVER_OPTIMIZERS["yogi"].build(),
        SERVER_OPTIMIZERS["adam"].build(lr=1.0, beta1=0.0),
        SERVER_OPTIMIZERS["adagrad"].build(lr=1.0),
    ):
        assert (two_rounds(optimizer)[0] - fedavg[0]).norm() > 1e-2
    same = two_rounds(Adam(lr=0.01, beta1=0.0, beta2=1.0, tau=0.01, initial_accumulator=0.0))
    torch.testing.assert_close(same[1], fedavg[1], rtol=1e-14, atol=1e-14)


@every_optimizer
def test_a_zero_direction_moves_only_what_remembers(name: str) -> None:
    optimizer = SERVER_OPTIMIZERS[name].build(**({"beta1": 0.5} if name == "adagrad" else {}))
    state, zero = optimizer.initial_state(2), torch.zeros(2, dtype=torch.float64)
    start = torch.ones(2, dtype=torch.float64)
    assert torch.equal(optimizer.step(start, zero, state), start)
    one = optimizer.step(start, tensor(FIRST), state)
    coasted = optimizer.step(one, zero, state)
    assert torch.equal(coasted, one) == (name == "sgd")
    if name == "momentum":
        torch.testing.assert_close(coasted - one, 0.9 * tensor(FIRST))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computes_in_float64_and_rounds_once(name: str, dtype: torch.dtype) -> None:
    optimizer = SERVER_OPTIMIZERS[name].build()
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(500, generator=generator).to(dtype)
    state, exact_state = optimizer.initial_state(500), optimizer.initial_state(500)
    assert all(value.dtype == torch.float64 for value in state.values())
    for _ in range(2):
        direction = torch.randn(500, generator=generator, dtype=torch.float64)
        before = theta.clone()
        result = optimizer.step(theta, direction, state)
        assert torch.equal(theta, before), "the given parameters are left alone"
        exact = optimizer.step(theta.double(), direction, exact_state)
        assert result.dtype == dtype
        assert torch.equal(result, exact.to(dtype))
        theta = result
    assert all(torch.equal(state[key], exact_state[key]) for key in state)


def test_rounding_twice_would_be_visible() -> None:
    generator = torch.Generator().manual_seed(1)
    theta, direction = torch.randn(500, generator=generator), torch.randn(500, generator=generator).double() / 3
    assert not torch.equal(Sgd(0.1).step(theta, direction, {}), theta + 0.1 * direction.float())


@every_optimizer
def test_in_slices_equals_at_once(name: str) -> None:
    optimizer = SERVER_OPTIMIZERS[name].build()
    generator = torch.Generator().manual_seed(0)
    slices = [slice(start, start + 333) for start in range(0, 1000, 333)]
    whole = parts = torch.randn(1000, generator=generator)
    state = optimizer.initial_state(1000)
    states = [optimizer.initial_state(len(range(1000)[part])) for part in slices]
    for _ in range(3):
        direction = torch.randn(1000, generator=generator, dtype=torch.float64)
        whole = optimizer.step(whole, direction, state)
        steps = [optimizer.step(parts[s], direction[s], own) for s, own in zip(slices, states, strict=True)]
        parts = torch.cat(steps)
    assert torch.equal(parts, whole)
    assert all(torch.equal(torch.cat([own[key] for own in states]), state[key]) for key in state)


@every_optimizer
def test_state_changes_in_place_and_a_copy_goes_on_alike(name: str) -> None:
    optimizer = SERVER_OPTIMIZERS[name].build()
    state = optimizer.initial_state(2)
    before = {key: (id(value), value.clone()) for key, value in state.items()}
    assert bool(state) == (name != "sgd")
    theta = optimizer.step(torch.ones(2, dtype=torch.float64), tensor(FIRST), state)
    for key, value in state.items():
        assert id(value) == before[key][0]
        assert not torch.equal(value, before[key][1])
    copied = {key: value.clone() for key, value in state.items()}
    other = SERVER_OPTIMIZERS[name].build()
    assert torch.equal(optimizer.step(theta, tensor(SECOND), state), other.step(theta, tensor(SECOND), copied))


@every_optimizer
def test_padding_of_zeros_stays_zero(name: str) -> None:
    optimizer = SERVER_OPTIMIZERS[name].build()
    state, theta = optimizer.initial_state(3), torch.zeros(3)
    for value in state.values():
        value.zero_()  # as a state that was read back is padded
    for _ in range(2):
        theta = optimizer.step(theta, torch.zeros(3, dtype=torch.float64), state)
    assert torch.equal(theta, torch.zeros(3))
