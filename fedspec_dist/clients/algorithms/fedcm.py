"""FedCM: the server's momentum enters every client's step.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, arXiv 2106.10874,
algorithm 2, in the form of FL-Simulator's program (the authors' could not be read).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.cohort import Cohort


class FedCM(LocalAlgorithm):
    """Every step follows `alpha g + (1 - alpha) m`, where `m`, 0 at first, is the same for all clients of a round.

    After the round, with the clients' weights `w_k`, the round's learning rate and the effective steps `a_k`

        m <- -sum_k w_k (y_k - theta) / (lr a_k)

    Weight decay is added after the mixture and not scaled by alpha; as part of the update, it also enters `m`.

    `alpha = 1` is FedAvg bit for bit. The first round is FedAvg with `lr alpha`. With one local step of all clients,
    `m` is an exponential average of the mean gradients. Zero updates make `m` zero.
    """

    server = ("momentum",)
    broadcast = ("momentum",)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def correct(self, vectors: LocalVectors) -> None:
        if self.alpha < 1:
            vectors.gradient.mul_(self.alpha).add_(vectors.received["momentum"], alpha=1 - self.alpha)

    def server_step(self, cohort: Cohort, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        state["momentum"].copy_(cohort.updates.combine(-cohort.weights / cohort.clients.distances))
        return direction
