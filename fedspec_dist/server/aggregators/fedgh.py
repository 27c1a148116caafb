"""FedGH: gradient harmonization between clients."""

from __future__ import annotations

from itertools import combinations
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.cohort import Cohort, Direction
from fedspec_dist.failures import NonFiniteError
from fedspec_dist.server.protocols import AnyLayers

MODES = ("pairwise", "snapshot")
_ZERO_SQUARED_NORM = 1e-24
# What is left of a vector that cancelled is rounding noise of this size next to its received squared norm.
_ZERO_RELATIVE_SQUARED_NORM = 1e-26
# A received vector is taken to lie in the span of others below this squared sine: the Gram matrix resolves no less.
_PARALLEL = 1e-13


class FedGH(AnyLayers):
    """The weighted mean of the updates after conflicts between pairs of clients are projected out.

    The formula and the paper are at `harmonize`. Without a conflict, and for one client, this is FedAvg bit for bit.

    Raises:
        ValueError: `mode` is not one of `MODES`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, mode: str = "pairwise") -> None:
        self.mode = _known_mode(mode)

    def direction(self, cohort: Cohort) -> Direction:
        gram = cohort.updates.gram()
        harmonized = harmonize(gram, self.mode)
        coefficients = (cohort.weights.unsqueeze(1) * harmonized).sum(0)
        return Direction(cohort.updates.combine(coefficients), {"fedgh/conflict_ratio": conflict_ratio(gram)})


def harmonize(gram: Tensor, mode: str = "pairwise") -> Tensor:
    """Coefficients `C [K, K]`, float64, of the harmonized updates `v_i = sum_k C_ik g_k`, from `gram_ij = g_i . g_j`.

    Pairs `i < j` are visited in ascending order. Where the two conflict (negative inner product)

        v_i <- v_i - (v_i . d_j / ||d_j||^2) d_j        v_j <- v_j - (v_j . d_i / ||d_i||^2) d_i

    In `pairwise` the directions `d` are copies of the two current vectors, which are also the ones tested; in
    `snapshot` they are the received `g`. A direction that is zero to rounding is not projected on. Without conflicts
    `C` is exactly the identity.

    "Tackling the Non-IID Issue in Heterogeneous Federated Learning by Gradient Harmonization", arXiv 2309.06692; the
    text leaves the order of the pairs and the meaning of `d` open, hence two modes.

    Raises:
        ValueError: `mode` is not one of `MODES`, or the Gram matrix has non-finite entries.
    """
    _known_mode(mode)
    inner = gram.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(inner).all():
        raise NonFiniteError("fedgh: the Gram matrix of the updates has entries that are not finite")
    identity = np.eye(len(inner))
    if (inner >= 0).all():
        return torch.from_numpy(identity).to(gram.device)
    # [K, 2, K]: of each vector its coordinates and its coefficients, which projections change alike.
    received = np.stack([_coordinates(inner), identity], axis=1)
    current = received.copy()
    directions = current if mode == "pairwise" else received
    negligible = np.maximum(_ZERO_SQUARED_NORM, _ZERO_RELATIVE_SQUARED_NORM * inner.diagonal())
    for i, j in combinations(range(len(inner)), 2):
        # The received vectors are tested by their Gram matrix: of orthogonal ones, the coordinates' inner product is
        # rounding noise of either sign, and a running vector may have a large component along such a direction.
        conflict = inner[i, j] if mode == "snapshot" else _dot(directions[i], directions[j])
        if conflict < 0:
            left, right = directions[i].copy(), directions[j].copy()
            current[i] -= _component(current[i], right, negligible[j])
            current[j] -= _component(current[j], left, negligible[i])
    return torch.from_numpy(current[:, 1].copy()).to(gram.device)


def conflict_ratio(gram: Tensor) -> float:
    """The share of the pairs `i < j` with `g_i . g_j < 0`, from `gram [K, K]`; 0 for fewer than two clients."""
    num_pairs = len(gram) * (len(gram) - 1) // 2
    return int((gram.triu(1) < 0).sum()) / num_pairs if num_pairs else 0.0


def _coordinates(inner: np.ndarray) -> np.ndarray:
    """Coordinates `X [K, K]` of the vectors in an orthonormal basis of their span: `X X^T = inner`, `[K, K]`.

    A Cholesky factorisation of the cosines, with pivoting. Inner products of coordinates lose no more digits than those
    of the vectors themselves, however far a vector shrinks; inner products made from coefficients and the Gram
    matrix, or kept up to date by rank-2 changes, lose twice as many. Only numpy's own sums and products are used, since
    the bits of LAPACK and BLAS depend on their number of threads.
    """
    norms = np.sqrt(inner.diagonal())
    inverse = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    remainder = inner * inverse[:, None] * inverse
    columns = np.zeros_like(remainder)
    for step in range(len(inner)):
        pivot = remainder.diagonal().argmax()
        if remainder[pivot, pivot] <= _PARALLEL:
            break
        columns[:, step] = remainder[:, pivot] / np.sqrt(remainder[pivot, pivot])
        remainder -= np.multiply.outer(columns[:, step], columns[:, step])
    return columns * norms[:, None]


def _dot(left: np.ndarray, right: np.ndarray) -> float:
    return float((left[0] * right[0]).sum())


def _component(vector: np.ndarray, direction: np.ndarray, negligible: float) -> np.ndarray | float:
    """`(v . d / ||d||^2) d`, or 0 where `||d||^2` is below `negligible`; both `[2, K]`."""
    squared_norm = _dot(direction, direction)
    if squared_norm < negligible:
        return 0.0
    return _dot(vector, direction) / squared_norm * direction


def _known_mode(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"server.aggregator.mode: {mode!r} is not one of {', '.join(MODES)}")
    return mode
