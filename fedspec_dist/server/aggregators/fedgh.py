"""FedGH: gradient harmonization between clients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers

MODES = ("pairwise", "snapshot")
_ZERO_SQUARED_NORM = 1e-24
# What is left of a vector that cancelled is rounding noise of this size next to its received squared norm.
_ZERO_RELATIVE_SQUARED_NORM = 1e-26
# A received vector is taken to lie in the span of others below this squared sine: the Gram matrix resolves no less.
_PARALLEL = 1e-13
# Up to so many clients the sums are of all their coordinates, also of those that are zero, and every client's
# coefficients are made: the bits of runs that were made so stay.
_FEW = 128
_CHUNK = 32768  # numbers treated at a time: few enough to stay in the cache


class FedGH(AnyLayers):
    """The weighted mean of the updates after conflicts between pairs of clients are projected out.

    The formula and the paper are at `harmonize`. Without a conflict, and for one client, this is FedAvg bit for bit.

    """

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def direction(self, cohort: Cohort) -> Direction:
        gram = cohort.updates.gram()
        ratio = conflict_ratio(gram)
        coefficients = harmonized_sum(gram, cohort.weights, self.mode)
        return Direction(cohort.updates.combine(coefficients), {"fedgh/conflict_ratio": ratio})


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
    inner = _checked(gram)
    return torch.from_numpy(_coefficients(inner, mode)).to(gram.device)


def harmonized_sum(gram: Tensor, weights: Tensor, mode: str = "pairwise") -> Tensor:
    """Coefficients `[K]` of `sum_i w_i v_i`, the `v_i` of `harmonize`.

    Of many clients, the coefficients of each `v_i` would take K^3 steps, and grow without bound where there are many
    more clients than parameters. So the coordinates of the sum are made, with K^2 R steps for updates of rank R, and
    what the projections changed of it is written as a combination of R updates that span all.
    """
    _known_mode(mode)
    inner = _checked(gram)
    if len(inner) <= _FEW:
        return (weights.unsqueeze(1) * torch.from_numpy(_coefficients(inner, mode))).sum(0)
    total = weights.numpy().copy()
    if (inner < 0).any():
        coordinates, pivots = _coordinates(inner)
        spanning, shares = coordinates[pivots], weights.numpy()[:, None]
        change = -(shares * coordinates).sum(0)
        for _ in _visit(coordinates, inner, mode):
            pass  # the coordinates are what is wanted
        change += (shares * coordinates).sum(0)
        total[pivots] += _solve(spanning, change)
    return torch.from_numpy(total)


def conflict_ratio(gram: Tensor) -> float:
    """The share of the pairs `i < j` with `g_i . g_j < 0`, from `gram [K, K]`; 0 for fewer than two clients."""
    num_pairs = len(gram) * (len(gram) - 1) // 2
    conflicts = sum(int((row[place:] < 0).sum()) for place, row in enumerate(gram, start=1))
    return conflicts / num_pairs if num_pairs else 0.0


def _checked(gram: Tensor) -> np.ndarray:
    inner = gram.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(inner).all():
        raise ValueError("fedgh: the Gram matrix of the updates has entries that are not finite")
    return inner


def _coefficients(inner: np.ndarray, mode: str) -> np.ndarray:
    """`C [K, K]`: every projection applied to the identity in turn."""
    _known_mode(mode)
    coefficients = np.eye(len(inner))
    if (inner >= 0).all():
        return coefficients
    coordinates, _ = _coordinates(inner)
    directions = coefficients if mode == "pairwise" else coefficients.copy()
    for i, j, of_left, of_right in _visit(coordinates, inner, mode):
        left, right = directions[i], directions[j]
        coefficients[i] -= of_left[:, None] * right
        coefficients[j] -= of_right[:, None] * left
    return coefficients


def _waves(num: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All pairs `i < j` in groups that may be visited at once, as index arrays.

    Of a pair, what happened before to its two vectors are the pairs `(i, j - 1)` and `(i - 1, j)` and those before
    them. So the pairs with `i + j = s` do not wait for each other, and no two of them share a vector.
    """
    for total in range(1, 2 * num - 2):
        i = np.arange(max(0, total - num + 1), (total + 1) // 2)
        yield i, total - i


def _visit(coordinates: np.ndarray, inner: np.ndarray, mode: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Harmonizes the coordinates `[K, R]` in place.

    Yields for pairs that were visited at once four arrays: `i` and `j` of those that conflict, how much of the
    direction of `j` was taken from `i`, and of that of `i` from `j`.
    """
    num, current = len(inner), coordinates
    directions = current if mode == "pairwise" else current.copy()
    negligible = np.maximum(_ZERO_SQUARED_NORM, _ZERO_RELATIVE_SQUARED_NORM * inner.diagonal())
    squared = _dots(directions, directions)
    rows = max(1, _CHUNK // max(current.shape[1], 1))
    for wave in _waves(num):
        for start in range(0, len(wave[0]), rows):
            i, j = (side[start : start + rows] for side in wave)
            # The received vectors are tested by their Gram matrix: of orthogonal ones, the coordinates' inner product
            # is rounding noise of either sign, and a running vector may have a large component along such a direction.
            products = inner[i, j] if mode == "snapshot" else _dots(_rows(current, i), _rows(current, j))
            conflicts = products < 0
            if not conflicts.any():
                continue
            i, j = i[conflicts], j[conflicts]
            left, right = directions[i], directions[j]
            of_left = of_right = products[conflicts]
            if mode == "snapshot":
                of_left, of_right = _dots(current[i], right), _dots(current[j], left)
            of_left = _quotients(of_left, squared[j], negligible[j])
            of_right = _quotients(of_right, squared[i], negligible[i])
            current[i] -= of_left[:, None] * right
            current[j] -= of_right[:, None] * left
            if mode == "pairwise":
                squared[i], squared[j] = _dots(current[i], current[i]), _dots(current[j], current[j])
            yield i, j, of_left, of_right


def _coordinates(inner: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Coordinates `X [K, R]` of the vectors in an orthonormal basis of their span, `X X^T = inner`; R that span it.

    A Cholesky factorisation of the cosines, with pivoting; R is the rank, so at most P. The rows of the pivots are a
    triangular matrix. Inner products of coordinates lose no more digits than those of the vectors themselves, however
    far a vector shrinks; inner products made from coefficients and the Gram matrix, or kept up to date by rank-2
    changes, lose twice as many. Only numpy's own sums and products are used, since the bits of LAPACK and BLAS depend
    on their number of threads.
    """
    num, pivots = len(inner), list[int]()
    norms = np.sqrt(inner.diagonal())
    inverse = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    remaining = inner.diagonal() * inverse * inverse  # squared sines to the span of the pivots so far
    columns = np.zeros((0, num))
    while len(pivots) < num and remaining[pivot := int(remaining.argmax())] > _PARALLEL:
        rank = len(pivots)
        if rank == len(columns):
            columns = np.concatenate([columns, np.zeros((min(max(rank, 64), num - rank), num))])
        column = inner[:, pivot] * inverse * inverse[pivot]
        for first in range(0, rank, 64):
            # One row after the other is subtracted: a sum over the first axis is made in order.
            taken = columns[first : min(first + 64, rank)]
            column = np.add.reduce(np.concatenate([column[None], taken * -taken[:, pivot, None]]), axis=0)
        columns[rank] = column / np.sqrt(remaining[pivot])
        remaining -= columns[rank] * columns[rank]
        pivots.append(pivot)
    coordinates = np.zeros((num, num if num <= _FEW else len(pivots)))
    coordinates[:, : len(pivots)] = columns[: len(pivots)].T
    return coordinates * norms[:, None], pivots


def _solve(triangular: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """`c [R]` with `sum_r c_r T_r = vector [R]` for the rows of the lower triangular `T [R, R]`."""
    solution, rest = np.zeros_like(vector), vector.copy()
    for place in range(len(vector) - 1, -1, -1):
        solution[place] = rest[place] / triangular[place, place]
        rest -= solution[place] * triangular[place]
    return solution


def _rows(matrix: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The rows at consecutive places, up or down, without a copy."""
    first, last = int(index[0]), int(index[-1])
    return matrix[first : last + 1] if first <= last else matrix[last : first + 1][::-1]


def _quotients(products: np.ndarray, squared: np.ndarray, negligible: np.ndarray) -> np.ndarray:
    """`v . d / ||d||^2`, or 0 where the direction is zero to rounding."""
    return np.divide(products, squared, out=np.zeros_like(products), where=squared >= negligible)


def _dots(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`left_n . right_n` of each row, summed by numpy."""
    return np.multiply(left, right, order="C").sum(axis=1)


def _known_mode(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"server.aggregator.mode: {mode!r} is not one of {', '.join(MODES)}")
    return mode
