"""Subspace iteration against the dense eigendecomposition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedspec_dist.fisher.products import from_jacobians
from fedspec_dist.fisher.sketch import random_basis, top_eigenpairs
from fedspec_dist.tasks.classification import Classification


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(eigenvalues: list[float], num_parameters: int, seed: int = 3) -> Tensor:
    values = torch.zeros(num_parameters, dtype=torch.float64)
    values[: len(eigenvalues)] = torch.tensor(eigenvalues, dtype=torch.float64)
    normal = torch.randn(num_parameters, num_parameters, generator=generator(seed), dtype=torch.float64)
    basis = torch.linalg.qr(normal).Q
    return basis @ torch.diag(values) @ basis.T


def product_with(dense: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda vectors: dense.to(vectors.dtype) @ vectors


def sketch(
    dense: Tensor,
    rank: int,
    *,
    oversampling: int = 5,
    power_iterations: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    start = random_basis(len(dense), rank + oversampling, seed, dtype=dtype)
    return top_eigenpairs(product_with(dense), start, rank, power_iterations=power_iterations)


def residual(dense: Tensor, pairs: tuple[Tensor, Tensor]) -> float:
    values, basis = pairs
    return float((dense @ basis - basis * values).norm())


def test_exact_without_iterations_when_the_sketch_is_as_wide_as_the_space() -> None:
    dense = matrix([9, 4, 3, 2, 1, 0.5], 6)
    values, basis = sketch(dense, 4, oversampling=2, power_iterations=0)
    torch.testing.assert_close(values, torch.tensor([9.0, 4, 3, 2], dtype=torch.float64))
    assert residual(dense, (values, basis)) < 1e-12


def test_width_is_reduced_to_the_number_of_parameters() -> None:
    dense = matrix([9, 4, 3, 2], 4)
    values, basis = sketch(dense, 3, oversampling=100, power_iterations=0)
    torch.testing.assert_close(values, torch.tensor([9.0, 4, 3], dtype=torch.float64))
    assert basis.shape == (4, 3)
    assert sketch(dense, 50, power_iterations=0)[1].shape == (4, 4)


def test_basis_is_orthonormal_and_values_descend() -> None:
    values, basis = sketch(matrix([2.0**-i for i in range(30)], 50), 8)
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-13)
    assert (values.diff() < 0).all()


def test_iterations_converge_to_the_eigenpairs() -> None:
    dense = matrix([0.8**i for i in range(40)], 60)
    residuals = [residual(dense, sketch(dense, 5, power_iterations=q)) for q in (0, 1, 3, 30)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[1] < 0.5 * residuals[0]
    assert residuals[3] < 1e-7
    values, basis = sketch(dense, 5, power_iterations=30)
    exact_values, exact_vectors = torch.linalg.eigh(dense)
    torch.testing.assert_close(values, exact_values.flip(0)[:5], rtol=1e-10, atol=0)
    overlap = (basis * exact_vectors.flip(1)[:, :5]).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-7)


def test_low_rank_operators_are_exact_and_keep_fewer_pairs() -> None:
    dense = matrix([5, 2, 1e-9], 30)
    values, basis = sketch(dense, 10)
    torch.testing.assert_close(values, torch.tensor([5.0, 2], dtype=torch.float64))
    assert residual(dense, (values, basis)) < 1e-8


def test_zero_operator_has_no_pairs() -> None:
    values, basis = sketch(torch.zeros(20, 20), 5, dtype=torch.float32)
    assert values.shape == (0,)
    assert basis.shape == (20, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_seed_same_bits_and_the_dtype_asked_for(dtype: torch.dtype) -> None:
    dense = matrix([0.8**i for i in range(40)], 60)
    first, again, other = (sketch(dense, 5, seed=seed, dtype=dtype) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])
    assert first[0].dtype == first[1].dtype == dtype


def test_float32_is_near_float64() -> None:
    dense = matrix([3.0, 2, 1], 40)
    single, double = sketch(dense, 3, dtype=torch.float32), sketch(dense, 3)
    torch.testing.assert_close(single[0].double(), double[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(single[1].double(), double[1], rtol=0, atol=1e-5)


def test_signs_do_not_depend_on_the_start() -> None:
    dense = matrix([5.0, 3, 2, 1], 30)
    reference = sketch(dense, 4, seed=0, power_iterations=4)[1]
    for seed in range(1, 6):
        torch.testing.assert_close(sketch(dense, 4, seed=seed, power_iterations=4)[1], reference, rtol=0, atol=1e-9)


def test_signs_hold_for_softmax_layers_with_two_classes() -> None:
    def forward(theta: Tensor, inputs: Tensor) -> Tensor:
        return inputs @ theta.view(2, 2).T

    product = from_jacobians(
        forward,
        torch.zeros(4, dtype=torch.float64),
        torch.tensor([[1.0, 2.0]], dtype=torch.float64),
        Classification().curvature_root,
    )
    expected = torch.tensor([1.0, 2, -1, -2], dtype=torch.float64) / 10**0.5
    for seed in range(6):
        start = random_basis(4, 2, seed, dtype=torch.float64)
        values, basis = top_eigenpairs(product, start, 2, power_iterations=1)
        torch.testing.assert_close(values, torch.tensor([2.5], dtype=torch.float64))
        torch.testing.assert_close(basis[:, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("power_iterations", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_products_are_named(power_iterations: int, bad: float) -> None:
    dense = torch.zeros(10, 10)
    dense[3, 4] = bad
    with pytest.raises(ValueError, match="product with the Fisher matrix has entries that are not finite"):
        sketch(dense, 3, power_iterations=power_iterations)
