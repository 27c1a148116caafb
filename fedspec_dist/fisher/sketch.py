"""Leading eigenpairs of a positive semi-definite linear operator by randomised subspace iteration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedspec_dist.core.failures import NonFiniteError


class NonFiniteFisherError(NonFiniteError):
    """A product with a Fisher matrix has a NaN or an infinity."""


Product = Callable[[Tensor], Tensor]
MIN_EIGENVALUE = 1e-8


def random_basis(
    num_parameters: int,
    num_columns: int,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`orth(Gaussian [P, l])`, with `l` reduced to P where it exceeds that.

    Drawn on the CPU, whatever the device: what a GPU draws depends on how many multiprocessors it has.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(num_parameters, min(num_columns, num_parameters), generator=generator, dtype=dtype)
    return torch.linalg.qr(start.to(device)).Q


def top_eigenpairs(
    product: Product,  # [P, l] -> [P, l]
    basis: Tensor,  # [P, l], orthonormal columns, such as a `random_basis`
    rank: int,
    *,
    power_iterations: int,
) -> tuple[Tensor, Tensor]:
    """The leading eigenpairs of `H`, `(eigenvalues [r] descending, basis [P, r])` with `r <= rank`.

        V = basis;  repeat q times: V = orth(H V)
        W = H V;  (V^T W + W^T V) / 2 = X L X^T;  U = V X

    A basis has `s` columns more than the rank, which are called oversampling. Eigenvalues up to `MIN_EIGENVALUE` are
    dropped, so `H = 0` gives `r = 0`. The sign makes `sum_i cos(i) u_i` positive: unlike the largest or the summed
    entry, that has no ties for softmax layers, whose eigenvectors repeat entries with both signs and sum to zero.

    Halko, Martinsson and Tropp, "Finding Structure with Randomness", 2011, algorithm 4.4 with a Rayleigh-Ritz step.

    Raises:
        NonFiniteFisherError: a product with `H` is not finite.
    """
    for _ in range(power_iterations):
        basis = torch.linalg.qr(_finite(product(basis))).Q
    image = _finite(product(basis))
    overlap = basis.T.to(torch.float64) @ image.to(torch.float64)
    values, vectors = torch.linalg.eigh((overlap + overlap.T) / 2)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = values > MIN_EIGENVALUE
    return values[kept].to(basis.dtype), _fix_signs(basis @ vectors[:, kept].to(basis.dtype))


def _finite(columns: Tensor) -> Tensor:
    if not bool(columns.isfinite().all()):
        raise NonFiniteFisherError("fisher: a product with the Fisher matrix has entries that are not finite")
    return columns


def _fix_signs(basis: Tensor) -> Tensor:
    probe = torch.arange(1, len(basis) + 1, device=basis.device, dtype=torch.float64).cos().to(basis.dtype)
    return torch.where(probe @ basis < 0, -basis, basis)
