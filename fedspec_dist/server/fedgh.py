"""FedGH: gradient harmonization between clients."""

from __future__ import annotations

from itertools import combinations
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.server.cohort import Cohort, Direction

MODES = ("pairwise", "snapshot")
_ZERO_SQUARED_NORM = 1e-24


class FedGH:
    """The weighted mean of the updates after conflicts between pairs of clients are projected out.

    Zhang et al., "Gradient Harmonization in Non-IID Federated Learning" (arXiv 2309.06692); see `harmonize`. Without a
    conflict, and for one client, this is FedAvg bit for bit.

    Raises:
        ValueError: `mode` is not one of `MODES`.
    """

    needs_sketches: ClassVar[bool] = False

    def __init__(self, mode: str = "pairwise") -> None:
        self.mode = _known_mode(mode)

    def direction(self, cohort: Cohort) -> Direction:
        gram = cohort.updates.gram()
        harmonized = harmonize(gram, self.mode).to(cohort.weights.device)
        coefficients = (cohort.weights.unsqueeze(1) * harmonized).sum(0)
        return Direction(cohort.updates.combine(coefficients), {"fedgh/conflict_ratio": conflict_ratio(gram)})


def harmonize(gram: Tensor, mode: str = "pairwise") -> Tensor:
    """Coefficients `C [K, K]`, float64, of the harmonized updates `v_i = sum_k C_ik g_k`, from `gram_ij = g_i . g_j`.

    Pairs `i < j` are visited in ascending order. Where the two conflict (negative inner product)

        v_i <- v_i - (v_i . d_j / ||d_j||^2) d_j        v_j <- v_j - (v_j . d_i / ||d_i||^2) d_i

    In `pairwise` the directions `d` are copies of the two current vectors, which are also the ones tested; in `snapshot`
    they are the received `g`. A direction that is zero to rounding is not projected on. Without conflicts `C` is
    exactly the identity.

    Zhang et al., arXiv 2309.06692; the text leaves the order of the pairs and the meaning of `d` open.

    Raises:
        ValueError: `mode` is not one of `MODES`, or the Gram matrix has non-finite entries.
    """
    _known_mode(mode)
    inner = gram.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(inner).all():
        raise ValueError("fedgh: the Gram matrix of the updates has entries that are not finite")
    received = _Combinations(inner)
    current = _Combinations(inner)
    for i, j in combinations(range(len(inner)), 2):
        directions = current if mode == "pairwise" else received
        if directions.inner(i, j) < 0:
            left, right = directions.row(i), directions.row(j)
            current.project(i, right)
            current.project(j, left)
    return torch.from_numpy(current.coefficients).to(gram.device)


def conflict_ratio(gram: Tensor) -> float:
    """The share of the pairs `i < j` with `g_i . g_j < 0`, from `gram [K, K]`; 0 for fewer than two clients."""
    num_pairs = len(gram) * (len(gram) - 1) // 2
    return int((gram.triu(1) < 0).sum()) / num_pairs if num_pairs else 0.0


class _Combinations:
    """Vectors `v_i = sum_k C_ik g_k`, known by their coefficients and by their inner products with the `g_k`.

    After a projection the inner products are computed again from the coefficients. Updating them in place would be as
    fast, but its rounding errors add up over the pairs, and what survives cancellation decides signs, hence
    conflicts. Sums are plain numpy reductions: BLAS results depend on its number of threads.
    """

    def __init__(self, gram: np.ndarray) -> None:
        self.gram = gram
        self.coefficients = np.eye(len(gram))
        self.products = gram.copy()

    def inner(self, i: int, j: int) -> float:
        return float((self.coefficients[i] * self.products[j]).sum())

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """A copy of `v_i`, as (coefficients, inner products)."""
        return self.coefficients[i].copy(), self.products[i].copy()

    def project(self, i: int, direction: tuple[np.ndarray, np.ndarray]) -> None:
        """`v_i <- v_i - (v_i . d / ||d||^2) d`, unless `d` is zero to rounding."""
        coefficients, products = direction
        squared_norm = (coefficients * products).sum()
        if squared_norm < max(_ZERO_SQUARED_NORM, self._rounding(coefficients)):
            return
        scale = (self.coefficients[i] * products).sum() / squared_norm
        self.coefficients[i] -= scale * coefficients
        self.products[i] = (self.gram * self.coefficients[i]).sum(1)

    def _rounding(self, coefficients: np.ndarray) -> float:
        # A vector that cancelled to zero keeps a squared norm of this size in coefficient space, of either sign.
        size = (np.abs(coefficients) * np.sqrt(self.gram.diagonal())).sum()
        return float(len(coefficients) * np.finfo(np.float64).eps * size**2)


def _known_mode(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"server.aggregator.mode: {mode!r} is not one of {', '.join(MODES)}")
    return mode
