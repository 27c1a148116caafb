"""What an aggregator sees of a round: matrices with one row per client, weights, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor


class RowMatrix(Protocol):
    """A `num_rows x P` matrix `U` whose columns may be spread over ranks.

    Small results (`[K, K]`, `[K, R]`, `[K]`) are float64 and the same bits on every rank; long ones are this rank's
    slice of a vector of length P, float64. Every rank calls every method, in the same order. `num_rows` may be zero.
    """

    @property
    def num_rows(self) -> int: ...

    def gram(self) -> Tensor:
        """`U U^T`, `[K, K]`."""

    def inner(self, other: RowMatrix) -> Tensor:
        """`U O^T`, `[K, R]`, for another matrix `O [R, P]` with the same columns on the same ranks."""

    def combine(self, coefficients: Tensor) -> Tensor:
        """This rank's slice of `sum_k c_k u_k`, rows added in ascending order; `coefficients [K]` float64."""

    def dot(self, vector_slice: Tensor) -> Tensor:
        """`U v`, `[K]`, from this rank's slice of `v`."""

    def norms(self) -> Tensor:
        """Euclidean norms of the rows, `[K]`."""

    def qr_r(self) -> Tensor:
        """`R [q, K]`, `q = min(P, K)`, of the thin factorisation `U^T = Q R`."""

    def combine_q(self, z: Tensor) -> Tensor:
        """This rank's slice of `Q z` for `z [q]`, with the `Q` that belongs to `qr_r`."""

    def zeros(self) -> Tensor:
        """This rank's slice of the zero vector."""


@dataclass(frozen=True)
class Sketches:
    """The leading eigenpairs of every client's Fisher matrix, stacked in client order.

    `rows` holds the R eigenvectors as rows, `eigenvalues [R]` is float64, `owners [R]` int64 is the row of the cohort's
    `updates` that each eigenvector belongs to. Clients may have contributed different numbers, or none.
    """

    rows: RowMatrix
    eigenvalues: Tensor
    owners: Tensor


@dataclass(frozen=True)
class Cohort:
    """One round's updates `y_k - theta` (one row a client, in client order) and weights `[K]` float64, summing to 1."""

    updates: RowMatrix
    weights: Tensor
    sketches: Sketches | None = None


@dataclass(frozen=True)
class Direction:
    """This rank's slice, float64, of the vector the server steps along, with scalars worth recording."""

    slice: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)


class Aggregator(Protocol):
    """`Cohort -> Direction`; `needs_sketches` asks the clients for Fisher sketches as well as updates."""

    needs_sketches: ClassVar[bool]

    def direction(self, cohort: Cohort) -> Direction: ...
