"""FedSAM and MoFedSAM: where the followed gradient is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import FedAvg
from fedspec_dist.clients.algorithms.sharpness import FedCM, FedSAM, MoFedSAM
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.config.methods import FILTERS, LOCAL_ALGORITHMS
from fedspec_dist.core.parameters import Segment
from tests.clients.harness import F64, START, Federation, toy, train
from tests.reference import high_pass_matrix, sam_ascent

SEGMENTS = (Segment("conv.weight", (2, 2), 0, 4), Segment("conv.bias", (2,), 4, 2), Segment("fc.weight", (3,), 6, 3))


def _points_visited(algorithm: FedSAM, start: Tensor, **settings: Any) -> tuple[list[Tensor], Tensor]:
    """Where the gradient was asked for in one step, and what the step followed."""
    seen: list[Tensor] = []

    def gradient(w: Tensor) -> Tensor:
        seen.append(w.clone())
        return (w - 1) ** 3

    trained = train(algorithm, gradient, start, 1, lr=1.0, segments=SEGMENTS, **settings)
    return seen, -trained.update


def test_one_step_by_hand() -> None:
    seen: list[Tensor] = []

    def gradient(w: Tensor) -> Tensor:
        seen.append(w.clone())
        return toy(1)(w)

    followed = -train(LOCAL_ALGORITHMS["fedsam"].build(rho=0.5), gradient, num_steps=1, lr=1.0).update
    assert len(seen) == 2
    assert (seen[1] - START).tolist() == pytest.approx([0.474341649, -0.158113883], abs=1e-9)
    assert followed.tolist() == pytest.approx([4.4230249471, -1.158113883], abs=1e-9)


@pytest.mark.parametrize("eta", [0.0, 0.2])
def test_the_adaptive_ascent_is_that_of_the_dense_twin(eta: float) -> None:
    start = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=F64)
    (at, above), followed = _points_visited(LOCAL_ALGORITHMS["fedsam"].build(rho=0.7, adaptive=True, eta=eta), start)
    assert torch.equal(at, start)
    scaled = [0, 1, 2, 3, 6, 7, 8]
    torch.testing.assert_close(
        above - start, sam_ascent(start, (start - 1) ** 3, 0.7, scaled, eta), rtol=1e-11, atol=1e-15
    )
    torch.testing.assert_close(followed, (above - 1) ** 3, rtol=1e-12, atol=1e-14)
    plain = _points_visited(LOCAL_ALGORITHMS["fedsam"].build(rho=0.7), start)[0][1]
    torch.testing.assert_close(plain - start, sam_ascent(start, (start - 1) ** 3, 0.7, [], eta), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("filter_ascent", [False, True])
def test_the_ascent_is_filtered_only_where_it_is_asked_for(filter_ascent: bool, adaptive: bool) -> None:
    start = torch.randn(9, generator=torch.Generator().manual_seed(3), dtype=F64)
    dense = torch.block_diag(*(high_pass_matrix(segment.size, 0.4) for segment in SEGMENTS))
    algorithm = LOCAL_ALGORITHMS["fedsam"].build(rho=0.7, adaptive=adaptive, filter_ascent=filter_ascent)
    (_, above), followed = _points_visited(algorithm, start, filtered=FILTERS["rfft"].build(SEGMENTS, 0.4))
    climbed = dense @ (start - 1) ** 3 if filter_ascent else (start - 1) ** 3
    scaled = [0, 1, 2, 3, 6, 7, 8] if adaptive else []
    torch.testing.assert_close(above - start, sam_ascent(start, climbed, 0.7, scaled, 0.2), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(followed, dense @ (above - 1) ** 3, rtol=1e-10, atol=1e-13)


def test_mofedsams_ascent_is_filtered_like_fedsams() -> None:
    start = torch.randn(9, generator=torch.Generator().manual_seed(4), dtype=F64)
    pair = (
        LOCAL_ALGORITHMS["fedsam"].build(rho=0.3, filter_ascent=True),
        MoFedSAM(alpha=1.0, rho=0.3, filter_ascent=True),
    )
    (ours, followed), (theirs, other) = (
        _points_visited(algorithm, start, filtered=FILTERS["rfft"].build(SEGMENTS, 0.4)) for algorithm in pair
    )
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(followed, other)
    unfiltered = _points_visited(
        LOCAL_ALGORITHMS["mofedsam"].build(alpha=1.0, rho=0.3), start, filtered=FILTERS["rfft"].build(SEGMENTS, 0.4)
    )[0]
    assert not torch.allclose(ours[1], unfiltered[1])


def test_adaptive_clients_in_a_batch_have_norms_of_their_own() -> None:
    starts = torch.randn(2, 9, generator=torch.Generator().manual_seed(2), dtype=F64)
    zero = torch.zeros(9, dtype=F64)

    def trained(centre: Tensor, num_clients: int | None = None) -> Tensor:
        method = LOCAL_ALGORITHMS["fedsam"].build(rho=0.7, adaptive=True)
        return train(
            method, lambda w: (w - centre) ** 3 - 1, zero, num_clients=num_clients, segments=SEGMENTS
        ).parameters

    both = trained(starts, num_clients=2)
    for client in range(2):
        torch.testing.assert_close(both[client], trained(starts[client]))


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_parameters_are_restored_exactly(adaptive: bool) -> None:
    start = torch.tensor([1e8, -1.0, 1e-8, 3.3, 1.0, 0.1, 0.7, 1e-20, -0.0])
    zero = train(
        LOCAL_ALGORITHMS["fedsam"].build(rho=0.5, adaptive=adaptive),
        lambda w: (w - 1) / w.abs().max(),
        start,
        lr=0.0,
        segments=SEGMENTS,
    )
    assert torch.equal(zero.parameters, start)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_gradient_of_zero_has_no_ascent(adaptive: bool) -> None:
    algorithm = LOCAL_ALGORITHMS["fedsam"].build(rho=0.5, adaptive=adaptive)
    for dtype in (torch.float32, F64):
        still = train(algorithm, lambda w: 0 * w, torch.ones(9, dtype=dtype), segments=SEGMENTS)
        assert torch.equal(still.parameters, torch.ones(9, dtype=dtype))


def test_without_rho_there_is_one_pass() -> None:
    seen, _ = _points_visited(LOCAL_ALGORITHMS["fedsam"].build(rho=0.0), torch.zeros(9, dtype=F64))
    assert len(seen) == 1


def test_a_step_of_fedsam_is_not_fedavgs() -> None:
    ours, plain = Federation(LOCAL_ALGORITHMS["fedsam"].build(rho=0.5)), Federation(FedAvg())
    ours.play(num_steps=1)
    plain.play(num_steps=1)
    assert not torch.allclose(ours.theta, plain.theta)


def test_mofedsam_by_hand() -> None:
    federation = Federation(LOCAL_ALGORITHMS["mofedsam"].build(alpha=0.5, rho=0.5))
    federation.play(num_steps=1)
    assert federation.state["momentum"].tolist() == pytest.approx([1.1057562368, 0.4604715292], abs=1e-9)
    federation.play(num_steps=1)
    assert federation.theta.tolist() == pytest.approx([0.7360043878, 0.8889870184], abs=1e-9)
    assert federation.state["momentum"].tolist() == pytest.approx([1.5341998849, 0.6496582871], abs=1e-9)


@pytest.mark.parametrize(
    ("limit", "other"),
    [
        (LOCAL_ALGORITHMS["mofedsam"].build(alpha=1.0, rho=0.3), LOCAL_ALGORITHMS["fedsam"].build(rho=0.3)),
        (LOCAL_ALGORITHMS["mofedsam"].build(alpha=0.3, rho=0.0), FedCM(alpha=0.3)),
    ],
    ids=["alpha=1", "rho=0"],
)
def test_mofedsams_limits_are_fedsam_and_fedcm_bit_for_bit(limit: MoFedSAM, other: FedSAM | FedCM) -> None:
    sgd = LocalSgd(momentum=0.5, weight_decay=0.01, clip_norm=1.0)
    ours, theirs = Federation(limit, sgd=sgd), Federation(other, sgd=sgd)
    for participants in ([0, 1], [1], [0, 1]):
        ours.play(participants, num_steps=3)
        theirs.play(participants, num_steps=3)
        assert torch.equal(ours.theta, theirs.theta)
