"""The coordinate-wise median."""

from __future__ import annotations

from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers


class Median(AnyLayers):
    """For every parameter the median of the clients' updates; of an even number, the mean of the two in the middle.

    All clients count alike: the weights are not used. One or two clients: FedAvg with uniform weights.

    D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018, definition 1 and algorithm 1.
    """

    def direction(self, cohort: Cohort) -> Direction:
        return Direction(cohort.updates.columnwise(median))


def median(updates: Tensor) -> Tensor:
    """Of each column of `[K, n]`: `[n]`."""
    ordered = updates.sort(dim=0).values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
