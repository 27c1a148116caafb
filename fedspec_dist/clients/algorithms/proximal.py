"""Local SGD that a proximal term holds near the model it was sent: FedProx, FedNova's clients, FedDyn."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.cohort import Cohort


class FedProx(LocalAlgorithm):
    """Local SGD on `f_k(y) + mu/2 ||y - theta||^2`.

    Adds `mu (y - theta)` to every step's gradient, unfiltered.

    `mu = 0` is FedAvg bit for bit, and so is any `mu` with a single local step, where `y = theta`. The step is stable
    on a quadratic of curvature L only while `lr (mu + L) < 2`.

    T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous
    Networks", 2020, algorithm 2.
    """

    def __init__(self, mu: float) -> None:
        self.mu = mu
        self.proximal = mu > 0

    def correct(self, vectors: LocalVectors) -> None:
        if self.mu:
            # The difference first: mu*y - mu*theta would not be exactly zero at y = theta.
            torch.sub(vectors.parameters, vectors.anchor, out=vectors.scratch)
            vectors.gradient.add_(vectors.scratch, alpha=self.mu)

    def effective_steps(self, num_steps: int, lr: float, momentum: float) -> float:
        """Without momentum `a <- a (1 - lr mu) + 1` in every step; with it, the pull is left out of account."""
        if momentum or not self.mu:
            return super().effective_steps(num_steps, lr, momentum)
        steps = 0.0
        for _ in range(num_steps):
            steps = steps * (1 - lr * self.mu) + 1
        return steps


class FedNova(FedProx):
    """Plain local SGD, with `mu > 0` FedProx; reports `a`, its `effective_steps`:

        plain           a = K
        momentum rho    a = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho)
        proximal mu     a <- a (1 - lr mu) + 1, K times from 0

    so that `-(y - theta) / (lr a)` is a mean of the client's gradients. Weight decay counts as part of the gradient.
    The clients' steps are FedAvg's bit for bit with `mu = 0`, FedProx's otherwise. The formulas do not cover momentum
    together with `mu > 0`.

    J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization", NeurIPS 2020, section 4 and appendix. The server's half is an aggregator.
    """


class FedDyn(FedProx):
    """Dynamic regularisation.

    FedProx with `mu = alpha`, and a linear term that makes every client stationary at the common optimum.

    A client keeps its drift `l_k`, the sum of all its updates so far. Every step follows

        g + alpha (y - theta) + alpha l_k

    then `l_k <- l_k + (y - theta)`, for those that took part, and the server, which keeps the mean of all N drifts,
    goes along the aggregated direction (the mean of the updates) to

        theta + direction + 1/N sum_{all} l_k

    The paper (as remembered) writes `-alpha l_k` as the gradient estimate of a client, and `h = -alpha mean l_k`. All
    clients have the same alpha; the authors' program divides it by `n_k N / n`. Default: FL-Simulator.

    Local steps of the first round are FedProx's bit for bit. `alpha = 0` is not FedAvg, since the server still shifts
    by the mean drift, nor are a single client's rounds SGD. With zero updates the model moves by the mean drift.

    D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated Learning Based on
    Dynamic Regularization", ICLR 2021, algorithm 1, in the form of the authors' program.
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
