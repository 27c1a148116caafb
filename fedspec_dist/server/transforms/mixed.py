"""Matrices whose rows are combinations of the rows of others, made only as far as somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, RowMatrix


@dataclass(frozen=True)
class Term:
    """`C B`: `coefficients [K, R]` of the rows of `rows [R, P]`, or `[K]`, the diagonal of such a matrix; float64."""

    coefficients: Tensor
    rows: RowMatrix

    def onto(self, values: Tensor) -> Tensor:
        """`C V [K, ...]` for `values [R, ...]`, where they lie."""
        return _product(self.coefficients.to(values.device), values)

    def from_left(self, coefficients: Tensor) -> Tensor:
        """`C^T a [R]` for `a [K]`; of the identity exactly `a`."""
        if self.coefficients.dim() == 1:
            return coefficients * self.coefficients
        return (coefficients.unsqueeze(1) * self.coefficients).sum(0)


class Mixed:
    """`sum_t C_t B_t`, a `RowMatrix`. Of the rows themselves nothing is made: all is done to what is small.

    A Gram matrix is `sum_st C_s (B_s B_t^T) C_t^T`, a combination `sum_t B_t^T (C_t^T a)`; a function of columns sees
    each block multiplied. Only what would take the Gram matrices of pieces, or a QR, makes the rows.
    """

    def __init__(self, terms: Sequence[Term], make: Callable[[Tensor], RowMatrix]) -> None:
        self._terms = terms
        self._make = make  # Slicing.rows
        self._made: RowMatrix | None = None
        self.num_rows = len(terms[0].coefficients)

    def mixed(self, coefficients: Tensor) -> Mixed:
        """`C` times this matrix."""
        return Mixed([replace(term, coefficients=term_of(coefficients, term)) for term in self._terms], self._make)

    def plus(self, term: Term) -> Mixed:
        return Mixed([*self._terms, term], self._make)

    def gram(self) -> Tensor:
        total = torch.zeros(self.num_rows, self.num_rows, dtype=torch.float64)
        for place, term in enumerate(self._terms):
            total += term.onto(term.onto(term.rows.gram()).T).T
            for other in self._terms[:place]:
                cross = term.onto(other.onto(term.rows.inner(other.rows).T).T)
                total += cross + cross.T
        return total

    def segment_grams(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        if len(self._terms) > 1:
            return self._rows().segment_grams(bounds)
        (term,) = self._terms
        grams = term.rows.segment_grams(bounds)
        return torch.stack([term.onto(term.onto(gram).T).T for gram in grams]) if len(grams) else grams

    def segment_dots(self, bounds: Sequence[tuple[int, int]], vector_slice: Tensor) -> Tensor:
        first, *others = [term.onto(term.rows.segment_dots(bounds, vector_slice).T).T for term in self._terms]
        return sum(others, start=first)

    def segment_squares(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        return self._rows().segment_squares(bounds)

    def inner(self, other: RowMatrix) -> Tensor:
        theirs = other._terms if isinstance(other, Mixed) else [Term(_ones(other.num_rows), other)]
        total = torch.zeros(self.num_rows, other.num_rows, dtype=torch.float64)
        for term in self._terms:
            for their in theirs:
                total += term.onto(their.onto(term.rows.inner(their.rows).T).T)
        return total

    def combine(self, coefficients: Tensor) -> Tensor:
        first, *others = [term.rows.combine(term.from_left(coefficients)) for term in self._terms]
        for other in others:
            first += other
        return first

    def columnwise(self, function: Callable[..., Tensor], *others: RowMatrix) -> Tensor:
        groups = [matrix._terms if isinstance(matrix, Mixed) else [_as_it_is(matrix)] for matrix in (self, *others)]
        first, *rest = [term.rows for group in groups for term in group]

        def of_columns(*blocks: Tensor) -> Tensor:
            given, left = [], iter(blocks)
            for group in groups:
                one, *more = [term.onto(next(left)) for term in group]
                given.append(sum(more, start=one))
            return function(*given)

        return first.columnwise(of_columns, *rest)

    def dot(self, vector_slice: Tensor) -> Tensor:
        first, *others = [term.onto(term.rows.dot(vector_slice)) for term in self._terms]
        return sum(others, start=first)

    def norms(self) -> Tensor:
        term, *others = self._terms
        if term.coefficients.dim() == 1 and not others:
            return term.coefficients.abs() * term.rows.norms()
        return self.gram().diagonal().clamp(min=0).sqrt()

    def qr_r(self) -> Tensor:
        return self._rows().qr_r()

    def combine_q(self, z: Tensor) -> Tensor:
        return self._rows().combine_q(z)

    def zeros(self) -> Tensor:
        return self._terms[0].rows.zeros()

    def _rows(self) -> RowMatrix:
        """With rows in memory, `K x P` float64 over all ranks."""
        if self._made is None:
            self._made = self._make(torch.stack([self.combine(unit) for unit in torch.eye(self.num_rows).double()]))
        return self._made


def mix(cohort: Cohort, coefficients: Tensor) -> Cohort:
    """The cohort with the updates `C U`, for `C [K, K]` or its diagonal `[K]`; the same one where C is the identity."""
    identity = _ones(len(coefficients)) if coefficients.dim() == 1 else torch.eye(len(coefficients)).double()
    if torch.equal(coefficients, identity):
        return cohort
    return replace(cohort, updates=as_mixed(cohort).mixed(coefficients))


def as_mixed(cohort: Cohort) -> Mixed:
    """The updates as they are."""
    if isinstance(cohort.updates, Mixed):
        return cohort.updates
    return Mixed([_as_it_is(cohort.updates)], cohort.slicing.rows)


def term_of(coefficients: Tensor, term: Term) -> Tensor:
    """`C` times those of the term, as a diagonal where both are."""
    if coefficients.dim() == 1 or term.coefficients.dim() > 1:
        return _product(coefficients, term.coefficients)
    return coefficients * term.coefficients


def _product(coefficients: Tensor, values: Tensor) -> Tensor:
    if coefficients.dim() > 1:
        return coefficients @ values
    return coefficients.reshape(-1, *[1] * (values.dim() - 1)) * values


def _as_it_is(rows: RowMatrix) -> Term:
    return Term(_ones(rows.num_rows), rows)


def _ones(num_rows: int) -> Tensor:
    return torch.ones(num_rows, dtype=torch.float64)
