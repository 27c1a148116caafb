"""Federated averaging."""

from __future__ import annotations

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers


class FedAvg(AnyLayers):
    """The weighted mean of the updates, `sum_k w_k u_k`.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, algorithm 1.
    """

    def direction(self, cohort: Cohort) -> Direction:
        return Direction(cohort.updates.combine(cohort.weights))
