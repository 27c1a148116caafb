"""The geometric median, as RFA has it."""

from __future__ import annotations

from math import inf

from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.distances import distances_to
from fedspec_dist.server.protocols import AnyLayers

# Coefficients that change less, in sum, have converged.
_CONVERGED = 1e-12


class GeometricMedian(AnyLayers):
    """The point v that lowers `sum_k w_k ||v - u_k||`, by Weiszfeld's iteration with smoothing, from the weighted mean:

        b_k = w_k / max(smoothing, ||v - u_k||)        v <- sum_k b_k u_k / sum_k b_k

    at most `iterations` times. All of them take place in the coefficients of v, so that the updates are read twice:
    for their Gram matrix and for the result. The weights are used: the breakdown point is half of them, not half of the
    clients. A `smoothing` above all distances, one client or equal updates: FedAvg up to rounding.

    Diagnostics: `geometric_median/iterations`, and `geometric_median/largest`, the largest coefficient of a client.

    K. Pillutla, S. M. Kakade, Z. Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal
    Processing 2022, algorithm 2 (number from memory). There an iteration is a round of messages, and three are made.
    """

    def __init__(self, smoothing: float, iterations: int) -> None:
        self.smoothing, self.iterations = smoothing, iterations

    def direction(self, cohort: Cohort) -> Direction:
        coefficients, steps = weiszfeld(cohort.updates.gram(), cohort.weights, self.smoothing, self.iterations)
        diagnostics = {
            "geometric_median/iterations": float(steps),
            "geometric_median/largest": float(coefficients.max()),
        }
        return Direction(cohort.updates.combine(coefficients), diagnostics)


def weiszfeld(gram: Tensor, weights: Tensor, smoothing: float, iterations: int) -> tuple[Tensor, int]:
    """Coefficients `[K]` of the point, summing to 1, and the number of steps that were made."""
    coefficients, steps, change = weights, 0, inf
    while steps < iterations and change > _CONVERGED:
        closeness = weights / distances_to(gram, coefficients).clamp(min=smoothing)
        before, coefficients, steps = coefficients, closeness / closeness.sum(), steps + 1
        change = float((coefficients - before).abs().sum())
    return coefficients, steps
