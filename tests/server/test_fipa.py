"""FIPA's merge: worked numbers, the released program's identity, and degenerate sketches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS
from fedspec_dist.core.cohort import Cohort, Sketches
from fedspec_dist.server.aggregators.fipa import merge, merge_coefficients, null_fraction, qr_merge_coefficients
from tests.reference import DenseRows, dense_cohort, fipa_dense, fipa_released

HALF = torch.tensor([0.5, 0.5], dtype=torch.float64)


def columns(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).T


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance * scale)


def random_problem(
    num_parameters: int, ranks: list[int], seed: int
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bases = [torch.linalg.qr(normal(num_parameters, rank)).Q for rank in ranks]
    eigenvalues = [10 ** normal(rank).sort(descending=True).values for rank in ranks]
    weights = torch.rand(len(ranks), generator=generator, dtype=torch.float64) + 0.1
    return bases, eigenvalues, normal(len(ranks), num_parameters), weights / weights.sum()


def qr_merge(
    bases: list[Tensor],
    eigenvalues: list[Tensor],
    updates: Tensor,
    weights: Tensor,
    *,
    damping: float,
    step: float,
    convention: str = "released",
) -> Tensor:
    q, r = torch.linalg.qr(torch.cat(bases, dim=1))
    z = qr_merge_coefficients(
        r,
        torch.cat(eigenvalues),
        torch.cat([w.expand(b.shape[1]) for w, b in zip(weights, bases, strict=True)]),
        torch.cat([b.T @ u for b, u in zip(bases, updates, strict=True)]),
        damping=damping,
        step=step,
        convention=convention,
    )
    return q @ z


both_merges = pytest.mark.parametrize("merged", [merge, qr_merge])
RANKS = [[3, 2], [4, 0, 1, 2], [7], [5, 5, 5, 5]]


@both_merges
@pytest.mark.parametrize(
    ("bases", "eigenvalues", "updates", "damping", "step", "released"),
    [
        pytest.param(
            [columns([1, 0]), columns([0, 1])],
            [[4.0], [1.0]],
            [[-1.0, 0], [0, -1]],
            0.5,
            0.5,
            [-0.2, -0.125],
            id="orthogonal",
        ),
        pytest.param(
            [columns([1, 0]), columns([0.6, 0.8])],
            [[2.0], [5.0]],
            [[1.0, 1], [0, 1]],
            1.0,
            1.0,
            [0.62295082, 0.32786885],
            id="oblique",
        ),
        pytest.param(
            [columns([1, 0]), columns([0.6, 0.8])],
            [[2.0], [5.0]],
            [[1.0, 1], [0, 1]],
            0.1,
            1.0,
            [0.09285714, 0.02857143],
            id="oblique, less damping",
        ),
        pytest.param(
            [columns([1, 0, 0], [0, 1, 0])],
            [[4.0, 1.0]],
            [[1.0, 1, 1]],
            0.5,
            0.5,
            [0.2222222222, 0.1666666667, 0],
            id="one client",
        ),
    ],
)
def test_worked_numbers(
    merged: object,
    bases: list[Tensor],
    eigenvalues: list[list[float]],
    updates: list[list[float]],
    damping: float,
    step: float,
    released: list[float],
) -> None:
    arguments = (
        bases,
        [torch.tensor(values, dtype=torch.float64) for values in eigenvalues],
        torch.tensor(updates, dtype=torch.float64),
        torch.full((len(bases),), 1 / len(bases), dtype=torch.float64),
    )
    expected = torch.tensor(released, dtype=torch.float64)
    close(merged(*arguments, damping=damping, step=step), expected, 1e-8)
    close(merged(*arguments, damping=damping, step=step, convention="exact"), expected / damping, 1e-7)


@both_merges
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("num_parameters", [7, 30])
@pytest.mark.parametrize("damping", [0.5, 0.01])
def test_equals_the_released_program_and_the_dense_inverse(
    merged: object, ranks: list[int], num_parameters: int, damping: float
) -> None:
    problem = random_problem(num_parameters, ranks, seed=sum(ranks))
    result = merged(*problem, damping=damping, step=0.7)
    assert result.dtype == torch.float64
    close(result, fipa_released(*problem, damping=damping, step=0.7))
    close(result, 0.7 * damping * fipa_dense(*problem, damping=damping))


@both_merges
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_without_damping_equals_the_pseudo_inverse(merged: object, ranks: list[int]) -> None:
    bases, eigenvalues, updates, weights = random_problem(30, ranks, seed=4)
    eigenvalues = [0.5 + values.clamp(max=3) for values in eigenvalues]
    result = merged(bases, eigenvalues, updates, weights, damping=0, step=1, convention="exact")
    close(result, fipa_dense(bases, eigenvalues, updates, weights, damping=0), 1e-9)


@both_merges
def test_without_damping_small_directions_are_dropped(merged: object) -> None:
    bases, updates = [columns([1, 0], [0, 1])], torch.ones(1, 2, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    values = [torch.tensor([1.0, 1e-7], dtype=torch.float64)]
    result = merged(bases, values, updates, one, damping=0, step=1, convention="exact")
    close(result, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert not merged(bases, values, updates, one, damping=0, step=1, convention="released").any()


@both_merges
def test_disjoint_clients_each_decide_their_own_coordinate(merged: object) -> None:
    values = [torch.tensor([1.0]).double(), torch.tensor([2.0]).double()]
    updates = torch.tensor([[1.0, 5], [7, -1]], dtype=torch.float64)
    bases = [columns([1, 0]), columns([0, 1])]
    result = merged(bases, values, updates, HALF, damping=0, step=1, convention="exact")
    close(result, torch.tensor([1.0, -1.0], dtype=torch.float64))


@both_merges
@pytest.mark.parametrize("damping", [0.5, 1e-3])
@pytest.mark.parametrize("difference", [0.0, 1e-14, 1e-7])
def test_identical_and_nearly_parallel_clients(merged: object, damping: float, difference: float) -> None:
    (basis,), (values,), update, _ = random_problem(20, [5], seed=2)
    noise = torch.randn(20, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    twin = torch.linalg.qr(basis + difference * noise).Q
    twin = twin * torch.sign((twin * basis).sum(0))
    updates = torch.cat([update, 2 * update])
    result = merged([basis, twin], [values, values], updates, HALF, damping=damping, step=1)
    close(result, damping * fipa_dense([basis, twin], [values, values], updates, HALF, damping=damping), 1e-11)


@both_merges
@pytest.mark.parametrize("damping", [0.5, 0.0])
def test_empty_sketches_do_not_move(merged: object, damping: float) -> None:
    empty = [torch.zeros(6, 0, dtype=torch.float64)] * 2
    none = [torch.zeros(0, dtype=torch.float64)] * 2
    updates = torch.ones(2, 6, dtype=torch.float64)
    result = merged(empty, none, updates, HALF, damping=damping, step=1, convention="exact")
    assert torch.equal(result, torch.zeros(6, dtype=torch.float64))


def test_float32_sketches_are_merged_in_float64() -> None:
    bases, eigenvalues, updates, weights = random_problem(30, [4, 3], seed=1)
    single = ([b.float() for b in bases], [v.float() for v in eigenvalues], updates.float(), weights)
    result = merge(*single, damping=0.3, step=1)
    close(result, 0.3 * fipa_dense(*single, damping=0.3))


def test_directions_outside_the_sketches_do_not_move() -> None:
    bases, eigenvalues, updates, weights = random_problem(30, [4, 3], seed=1)
    moved = merge(bases, eigenvalues, updates, weights, damping=0.3, step=1)
    span = torch.linalg.qr(torch.cat(bases, dim=1)).Q
    close(span @ (span.T @ moved), moved)


def test_larger_damping_moves_less_in_the_exact_convention() -> None:
    problem = random_problem(30, [4, 3], seed=1)
    norms = [float(merge(*problem, damping=damping, step=1, convention="exact").norm()) for damping in (0.01, 0.1, 1.0)]
    assert norms[0] > norms[1] > norms[2] > 0
    released = merge(*problem, damping=1e9, step=1)
    mean, right = torch.zeros(30).double(), zip(*problem, strict=True)
    for basis, values, update, weight in right:
        mean += weight * basis @ (values * (basis.T @ update))
    close(released, mean, 1e-6)


def test_coefficients_are_shared_by_every_distribution() -> None:
    bases, eigenvalues, updates, weights = random_problem(30, [4, 3], seed=1)
    stacked = torch.cat(bases, dim=1)
    t = merge_coefficients(
        stacked.T @ stacked,
        torch.cat(eigenvalues),
        torch.cat([w.expand(b.shape[1]) for w, b in zip(weights, bases, strict=True)]),
        torch.cat([b.T @ u for b, u in zip(bases, updates, strict=True)]),
        damping=0.3,
        step=1,
    )
    close(stacked @ t, merge(bases, eigenvalues, updates, weights, damping=0.3, step=1))


def cohort(bases: list[Tensor], eigenvalues: list[Tensor], updates: Tensor, weights: Tensor) -> Cohort:
    owners = torch.cat([torch.full((basis.shape[1],), k) for k, basis in enumerate(bases)])
    sketches = Sketches(DenseRows(torch.cat(bases, dim=1).T), torch.cat(eigenvalues), owners)
    return replace(dense_cohort(updates, weights=weights.tolist()), sketches=sketches)


@pytest.mark.parametrize("form", ["gram", "tsqr"])
def test_aggregator_diagnostics(form: str) -> None:
    bases, eigenvalues, updates, weights = random_problem(30, [4, 0, 3], seed=1)
    diagnostics = (
        AGGREGATORS["fipa"].build(merge=form).direction(cohort(bases, eigenvalues, updates, weights)).diagnostics
    )
    mean = weights @ updates
    span = torch.linalg.qr(torch.cat(bases, dim=1)).Q
    outside = mean - span @ (span.T @ mean)
    assert diagnostics["fipa/rank"] == pytest.approx(7 / 3)
    assert diagnostics["fipa/eigenvalue_max"] == float(torch.cat(eigenvalues).max())
    assert diagnostics["fipa/null_fraction"] == pytest.approx(float(outside @ outside / (mean @ mean)), abs=1e-8)


@pytest.mark.parametrize("form", ["gram", "tsqr"])
def test_aggregator_without_any_eigenpair(form: str) -> None:
    bases, eigenvalues, updates, weights = random_problem(6, [0, 0], seed=1)
    direction = AGGREGATORS["fipa"].build(merge=form).direction(cohort(bases, eigenvalues, updates, weights))
    assert torch.equal(direction.slice, torch.zeros(6, dtype=torch.float64))
    assert direction.diagnostics == {
        "fipa/rank": 0.0,
        "fipa/null_fraction": 1.0,
        "fipa/eigenvalue_max": 0.0,
    }


def test_null_fraction_of_repeated_columns_and_of_zero() -> None:
    basis = columns([1, 0, 0], [1, 0, 0], [0, 1, 0])
    vector = torch.tensor([3.0, 0, 4], dtype=torch.float64)
    assert null_fraction(basis.T @ basis, basis.T @ vector, 25.0) == pytest.approx(16 / 25, abs=1e-8)
    assert null_fraction(basis.T @ basis, torch.zeros(3).double(), 0.0) == 0.0
