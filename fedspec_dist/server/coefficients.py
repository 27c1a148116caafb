"""Distances between points that are combinations of the updates, from their Gram matrix alone. All float64.

Sums are torch's own and not those of a matrix product, whose bits depend on the number of threads.
"""

from __future__ import annotations

from torch import Tensor


def squared_distances(gram: Tensor) -> Tensor:
    """`||u_i - u_j||^2`, `[K, K]`, from `gram [K, K]`; exactly symmetric."""
    squares = gram.diagonal()
    return (squares.unsqueeze(1) + squares - (gram + gram.T)).clamp(min=0)


def distances_to(gram: Tensor, coefficients: Tensor) -> Tensor:
    """`||u_k - v||`, `[K]`, for `v = sum_j c_j u_j`, from `gram [K, K]` and `coefficients [K]`."""
    along = (gram * coefficients).sum(1)
    return (gram.diagonal() - 2 * along + (coefficients * along).sum()).clamp(min=0).sqrt()
