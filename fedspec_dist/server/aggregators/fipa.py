"""FIPA: updates merged in Fisher geometry, direction by direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction, Sketches
from fedspec_dist.server.protocols import AnyLayers

# The relative cut-off of the released function-fitting programs, for merges without damping.
PSEUDO_INVERSE_CUTOFF = 1e-5
# Far above the rounding of a float64 Gram matrix, far below what a direction seen by one client contributes.
_SPAN_RIDGE = 1e-10


class Fipa(AnyLayers):
    """One damped Newton-like step on the clients' quadratic models, `step * (Hbar + damping I)^-1 b`.

        Hbar = sum_m w_m U_m L_m U_m^T        b = sum_m w_m U_m L_m U_m^T delta_m

    with `(U_m, L_m)` the leading eigenpairs of client m's Fisher matrix at the broadcast parameters. The released
    program multiplies the step by `damping` (convention `released`); `exact` does not. Directions no client's sketch
    spans do not move. `merge` chooses between the Gram form and the thin QR of the paper; both give the same step.

    Diagnostics: `fipa/rank`, the mean number of eigenpairs of a client; `fipa/null_fraction`, the share of the weighted
    mean update's squared norm outside the span of all sketches; `fipa/eigenvalue_max`.

    "Fisher-Informed Parameterwise Aggregation for Federated Learning with Heterogeneous Data", arXiv 2601.13608, and
    its released program.
    """

    def __init__(
        self,
        rank: int,
        oversampling: int,
        power_iterations: int,
        damping: float,
        step: float,
        convention: str,
        merge: str,
    ) -> None:
        self.rank, self.oversampling, self.power_iterations = rank, oversampling, power_iterations
        self.damping, self.step, self.convention, self.merge = damping, step, convention, merge

    def direction(self, cohort: Cohort) -> Direction:
        sketches = cohort.sketches
        assert sketches is not None, "fipa needs sketches; the round did not make any"
        if sketches.rows.num_rows == 0:
            return Direction(cohort.updates.zeros(), _diagnostics(cohort, sketches, 1.0))
        inner, gram, owners = sketches.rows.inner(cohort.updates), sketches.rows.gram(), sketches.owners
        projections = inner.gather(1, owners.unsqueeze(1)).squeeze(1)
        mean_update = (inner * cohort.weights).sum(1)
        outside = null_fraction(gram, mean_update, _squared_norm(cohort))
        weights = cohort.weights[owners]
        return Direction(self._merge(sketches, gram, weights, projections), _diagnostics(cohort, sketches, outside))

    def _merge(self, sketches: Sketches, gram: Tensor, weights: Tensor, projections: Tensor) -> Tensor:
        known = (sketches.eigenvalues, weights, projections)
        if self.merge == "gram":
            return sketches.rows.combine(
                merge_coefficients(gram, *known, damping=self.damping, step=self.step, convention=self.convention)
            )
        z = qr_merge_coefficients(
            sketches.rows.qr_r(), *known, damping=self.damping, step=self.step, convention=self.convention
        )
        return sketches.rows.combine_q(z)


def merge_coefficients(
    gram: Tensor,  # [R, R] float64, V^T V
    eigenvalues: Tensor,  # [R] float64
    row_weights: Tensor,  # [R] float64, the weight of the client each column of V belongs to
    projections: Tensor,  # [R] float64, U_m^T delta_m
    *,
    damping: float,
    step: float,
    convention: str = "released",
    cutoff: float = PSEUDO_INVERSE_CUTOFF,
) -> Tensor:
    """`t [R]` such that the merged update is `V t`, with `V = [U_1 ... U_K]` and `h = sqrt(w_m lambda)`:

        t = step * h * (diag(h) G diag(h) + damping I)^-1 (h * U_m^T delta_m)

    The push-through identity makes `V t` equal to `step * (Hbar + damping I)^-1 b` exactly, also when columns are
    parallel or outnumber the parameters: the matrix stays symmetric positive definite. Without damping it is the
    pseudo-inverse of `Hbar`, with eigenvalues below `cutoff` times the largest dropped. Convention `released`
    multiplies by `damping`.
    """
    h = (row_weights * eigenvalues).sqrt()
    solution = _solve(h.unsqueeze(1) * gram * h, h * projections, damping, cutoff)
    return _factor(step, damping, convention) * h * solution


def qr_merge_coefficients(
    r_factor: Tensor,  # [q, R] float64, q = min(P, R), from the thin QR V = Q R
    eigenvalues: Tensor,  # [R] float64
    row_weights: Tensor,  # [R] float64
    projections: Tensor,  # [R] float64, U_m^T delta_m
    *,
    damping: float,
    step: float,
    convention: str = "released",
    cutoff: float = PSEUDO_INVERSE_CUTOFF,
) -> Tensor:
    """`z [q]` such that the merged update is `Q z`:

        K = R diag(w_m lambda) R^T    Q^T b = R (w_m lambda U_m^T delta_m)    z = step * (K + damping I)^-1 Q^T b

    The released program adds `b - Q Q^T b`. Here `b = V g = Q (R g)` lies in the span of Q, also when V is rank
    deficient (Q then has extra columns, on which `K` and `Q^T b` vanish), so that term is rounding noise and is left
    out.
    """
    importance = row_weights * eigenvalues
    matrix = r_factor * importance @ r_factor.T
    solution = _solve((matrix + matrix.T) / 2, r_factor @ (importance * projections), damping, cutoff)
    return _factor(step, damping, convention) * solution


def merge(
    bases: Sequence[Tensor],  # K of [P, r_m]
    eigenvalues: Sequence[Tensor],  # K of [r_m]
    updates: Tensor,  # [K, P]
    weights: Tensor,  # [K], sum 1
    *,
    damping: float,
    step: float,
    convention: str = "released",
) -> Tensor:
    """The merged update `[P]`, float64, on one process: see `merge_coefficients`. Ranks `r_m` may differ or be zero."""
    updates, weights = updates.to(torch.float64), weights.to(torch.float64)
    bases = [basis.to(torch.float64) for basis in bases]
    stacked = torch.cat(bases, dim=1)
    coefficients = merge_coefficients(
        stacked.T @ stacked,
        torch.cat([values.to(torch.float64) for values in eigenvalues]),
        torch.cat([weight.expand(basis.shape[1]) for weight, basis in zip(weights, bases, strict=True)]),
        torch.cat([basis.T @ update for basis, update in zip(bases, updates, strict=True)]),
        damping=damping,
        step=step,
        convention=convention,
    )
    return stacked @ coefficients


def null_fraction(gram: Tensor, projection: Tensor, squared_norm: float) -> float:
    """The share of `||d||^2` outside the span of V, from `gram = V^T V [R, R]`, `projection = V^T d [R]` and `||d||^2`.

    `1 - d^T V (V^T V)^-1 V^T d / ||d||^2`, in [0, 1]; a slight ridge stands in for the pseudo-inverse where columns are
    parallel. 0 for `d = 0`.
    """
    if squared_norm <= 0:
        return 0.0
    ridge = _SPAN_RIDGE * float(gram.diagonal().max())
    inside = float((projection * _solve(gram, projection, ridge, 0.0)).sum())
    return min(max(1 - inside / squared_norm, 0.0), 1.0)


def _solve(matrix: Tensor, right: Tensor, damping: float, cutoff: float) -> Tensor:
    """`(matrix + damping I)^-1 right` for a positive semi-definite matrix; the pseudo-inverse when damping is 0."""
    if damping > 0:
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve(matrix + damping * identity, right)
    if len(matrix) == 0:
        return right
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    kept = (eigenvalues > cutoff * eigenvalues[-1]) & (eigenvalues > 0)
    inverse = torch.where(kept, 1 / eigenvalues, 0)
    return vectors @ (inverse * (vectors.T @ right))


def _factor(step: float, damping: float, convention: str) -> float:
    return step * damping if convention == "released" else step


def _squared_norm(cohort: Cohort) -> float:
    return float((cohort.weights.unsqueeze(1) * cohort.updates.gram() * cohort.weights).sum())


def _diagnostics(cohort: Cohort, sketches: Sketches, outside: float) -> dict[str, float]:
    largest = float(sketches.eigenvalues.max()) if sketches.rows.num_rows else 0.0
    return {
        "fipa/rank": sketches.rows.num_rows / cohort.updates.num_rows,
        "fipa/null_fraction": outside,
        "fipa/eigenvalue_max": largest,
    }
