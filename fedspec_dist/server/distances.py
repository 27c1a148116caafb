"""Inner products of vectors, and distances of points from a Gram matrix: the same bits with any number of threads.

Sums are torch's own in pieces of one size, and not those of a matrix product. All in float64.
"""

from __future__ import annotations

from math import fsum

import torch
from torch import Tensor

# Torch gives longer sums to several threads, in as many pieces; the last bits then depend on the number of threads.
_CHUNK = 16384


def inner(left: Tensor, right: Tensor) -> float:
    """`left . right` for vectors `[P]`, in float64 and with the same bits at any number of ranks and threads."""
    parts = [(a.double() * b.double()).sum() for a, b in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True)]
    return fsum(torch.stack(parts).tolist()) if parts else 0.0


def squared_distances(gram: Tensor) -> Tensor:
    """`||u_i - u_j||^2`, `[K, K]`, from `gram [K, K]`; exactly symmetric."""
    squares = gram.diagonal()
    return (squares.unsqueeze(1) + squares - (gram + gram.T)).clamp(min=0)


def distances_to(gram: Tensor, coefficients: Tensor) -> Tensor:
    """`||u_k - v||`, `[K]`, for `v = sum_j c_j u_j`, from `gram [K, K]` and `coefficients [K]`."""
    along = (gram * coefficients).sum(1)
    return (gram.diagonal() - 2 * along + (coefficients * along).sum()).clamp(min=0).sqrt()
