"""FedDyn: dynamic regularisation.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated Learning Based on
Dynamic Regularization", ICLR 2021, algorithm 1, in the form of the authors' program.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client
from fedspec_dist.clients.algorithms.fedprox import FedProx
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.cohort import Cohort


class FedDyn(FedProx):
    """FedProx with `mu = alpha`, and a linear term that makes every client stationary at the common optimum.

    A client keeps its drift `l_k`, the sum of all its updates so far. Every step follows

        g + alpha (y - theta) + alpha l_k

    then `l_k <- l_k + (y - theta)`, for those that took part, and the server, which keeps the mean of all N drifts,
    goes along the aggregated direction (the mean of the updates) to

        theta + direction + 1/N sum_{all} l_k

    The paper (as remembered) writes `-alpha l_k` as the gradient estimate of a client, and `h = -alpha mean l_k`. All
    clients have the same alpha; the authors' program divides it by `n_k N / n`. Default: FL-Simulator.

    Local steps of the first round are FedProx's bit for bit. `alpha = 0` is not FedAvg, since the server still shifts
    by the mean drift, nor are a single client's rounds SGD. With zero updates the model moves by the mean drift.
    """

    own: tuple[str, ...] = ("drift",)
    server: tuple[str, ...] = ("drift",)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        super().__init__(mu=alpha)

    def begin(self, vectors: LocalVectors, client: Client) -> None:
        torch.mul(vectors.own["drift"], self.alpha, out=vectors.constant)

    def correct(self, vectors: LocalVectors) -> None:
        super().correct(vectors)  # alpha (y - theta)
        vectors.gradient.add_(vectors.constant)

    def end(self, vectors: LocalVectors, update: Tensor, client: Client) -> None:
        vectors.own["drift"].add_(update)

    def server_step(self, cohort: Cohort, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        share = torch.full((cohort.updates.num_rows,), 1 / cohort.clients.population, dtype=torch.float64)
        mean_drift = state["drift"].double() + cohort.updates.combine(share)
        state["drift"].copy_(mean_drift)
        return direction + mean_drift
