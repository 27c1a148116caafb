"""Centered clipping: the mean of the updates, each shortened around what the last round came to."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.distances import distances_to
from fedspec_dist.server.protocols import AnyLayers


class CenteredClipping(AnyLayers):
    """From the direction of the last round, `v = v_last` (0 at first, and where a phase begins), so many times

        v <- v + sum_k w_k (u_k - v) min(1, radius / ||u_k - v||)

    The weights are used; the paper's are equal. One malicious client moves the direction by at most `w_k radius` an
    iteration. A `radius` above all distances: FedAvg up to rounding; a small one needs rounds, or iterations, to come
    to where the clients are, also with one client or equal updates.

    In the paper, which has the same workers in every step, they send momenta. Clients that come and go have none; the
    local methods `fedcm` and `mofedsam` have the server's enter every step.

    Diagnostics: `centered_clipping/clipped`, the share of clients that the last iteration shortened.

    S. P. Karimireddy, L. He, M. Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021,
    algorithm 2 (number from memory).
    """

    memory: ClassVar[tuple[str, ...]] = ("centre",)

    def __init__(self, radius: float, iterations: int) -> None:
        self.radius, self.iterations = radius, iterations

    def direction(self, cohort: Cohort) -> Direction:
        updates, last = cohort.updates, cohort.memory["centre"]
        centre = cohort.slicing.rows(last.unsqueeze(0))
        along = updates.inner(centre)
        gram = torch.cat([torch.cat([updates.gram(), along], dim=1), torch.cat([along.T, centre.gram()], dim=1)])
        coefficients, clipped = clipped_mean(gram, cohort.weights, self.radius, self.iterations)
        direction = updates.combine(coefficients[:-1]) + float(coefficients[-1]) * last
        last.copy_(direction)
        return Direction(direction, {"centered_clipping/clipped": clipped})


def clipped_mean(gram: Tensor, weights: Tensor, radius: float, iterations: int) -> tuple[Tensor, float]:
    """Coefficients `[K + 1]` of v, and the share of clients shortened last, from the Gram matrix of the K updates and
    the centre, `[K + 1, K + 1]`, the centre last."""
    coefficients = torch.zeros_like(gram[0])
    coefficients[-1] = 1
    for _ in range(iterations):
        apart = distances_to(gram, coefficients)[:-1]
        steps = weights * torch.where(apart > radius, radius / apart, 1.0)
        coefficients = coefficients * (1 - steps.sum())
        coefficients[:-1] += steps
    return coefficients, float((apart > radius).double().mean())
