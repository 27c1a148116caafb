"""Local algorithms and the step on the spec's toy problem, where every number can be checked by hand.

Two clients with gradients `A_i (w - b_i)`: A_1 = diag(1, 2), b_1 = (1, 0), A_2 = diag(3, 1), b_2 = (0, 2); start
(1, 1), lr 0.1, two steps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedspec_dist import methods
from fedspec_dist.clients.fedavg import FedAvg
from fedspec_dist.clients.fedprox import FedProx
from fedspec_dist.clients.sgd import LocalSgd
from fedspec_dist.clients.vectors import LocalAlgorithm, LocalVectors

F64 = torch.float64
CURVATURES = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=F64)
CENTRES = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=F64)
START = torch.tensor([1.0, 1.0], dtype=F64)


def _train(
    algorithm: LocalAlgorithm,
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    num_steps: int = 2,
    sgd: LocalSgd | None = None,
    lr: float = 0.1,
) -> Tensor:
    """Parameters after `num_steps`, for `start [P]` or, batched over clients, `[C, P]`."""
    sgd = sgd or LocalSgd()
    vectors = LocalVectors(start.clone(), torch.zeros_like(start), START, torch.zeros_like(start))
    velocity = torch.zeros_like(start)
    for _ in range(num_steps):
        vectors.gradient.copy_(gradient(vectors.parameters))
        algorithm.correct(vectors)
        sgd.step(vectors, velocity, lr)
    return vectors.parameters


def _toy(client: int) -> Callable[[Tensor], Tensor]:
    return lambda w: CURVATURES[client] * (w - CENTRES[client])


# name -> (algorithm, y_1, y_2)
HAND_COMPUTED = {
    "fedavg": (FedAvg(), (1.0, 0.64), (0.49, 1.19)),
    "fedprox": (FedProx(mu=1.0), (1.0, 0.66), (0.52, 1.18)),
}


def test_every_algorithm_of_the_table_is_in_this_one() -> None:
    assert HAND_COMPUTED.keys() == methods.LOCAL_ALGORITHMS.keys()


@pytest.mark.parametrize("name", HAND_COMPUTED)
def test_two_clients_by_hand(name: str) -> None:
    algorithm, *expected = HAND_COMPUTED[name]
    for client, values in enumerate(expected):
        trained = _train(algorithm, _toy(client), START)
        torch.testing.assert_close(trained, torch.tensor(values, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", HAND_COMPUTED)
def test_a_batch_of_clients_is_each_client_alone(name: str) -> None:
    algorithm = HAND_COMPUTED[name][0]
    sgd = LocalSgd(momentum=0.9, weight_decay=0.01, clip_norm=0.5)
    both = _train(algorithm, lambda w: CURVATURES * (w - CENTRES), START.repeat(2, 1), 5, sgd)
    for client in range(2):
        torch.testing.assert_close(both[client], _train(algorithm, _toy(client), START, 5, sgd))


def test_fedprox_degenerates_to_fedavg_bit_for_bit() -> None:
    plain = _train(FedAvg(), _toy(1), START, 5)
    assert torch.equal(_train(FedProx(mu=0.0), _toy(1), START, 5), plain)
    one_step = _train(FedAvg(), _toy(1), START / 3, 1)
    vectors_start = START / 3
    anchored = LocalVectors(vectors_start.clone(), _toy(1)(vectors_start), vectors_start, torch.zeros(2, dtype=F64))
    FedProx(mu=7.0).correct(anchored)
    LocalSgd().step(anchored, None, 0.1)
    assert torch.equal(anchored.parameters, one_step)


def test_the_prox_term_uses_the_anchor_and_not_the_model_in_training() -> None:
    far = _train(FedProx(mu=1.0), lambda w: torch.zeros_like(w), torch.tensor([3.0, 1.0], dtype=F64), 1)
    assert far.tolist() == pytest.approx([2.8, 1.0])


def test_clipping_then_weight_decay_by_hand() -> None:
    vectors = LocalVectors(
        torch.tensor([1.0, -1.0], dtype=F64), torch.tensor([30.0, 40.0], dtype=F64), START, torch.zeros(2, dtype=F64)
    )
    LocalSgd(weight_decay=1e-3, clip_norm=10.0).step(vectors, None, 0.1)
    assert vectors.parameters.tolist() == pytest.approx([0.399900012, -1.799899984], abs=1e-9)


def test_a_small_gradient_is_not_clipped() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=F64)
    vectors = LocalVectors(torch.zeros(2, dtype=F64), gradient.clone(), START, torch.zeros(2, dtype=F64))
    LocalSgd(clip_norm=10.0).step(vectors, None, 1.0)
    assert torch.equal(vectors.parameters, -gradient)


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "clip_norm"), [(0.0, 0.0, None), (0.9, 5e-4, None), (0.5, 0.1, 1.0)]
)
def test_the_step_is_torchs_sgd(momentum: float, weight_decay: float, clip_norm: float | None) -> None:
    parameter = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for _ in range(6):
        parameter.grad = _toy(0)(parameter.detach()) * 3
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
        optimizer.step()
    ours = _train(FedAvg(), lambda w: _toy(0)(w) * 3, START, 6, LocalSgd(momentum, weight_decay, clip_norm))
    torch.testing.assert_close(ours, parameter.detach(), rtol=1e-12, atol=1e-14)
