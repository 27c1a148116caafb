"""FedProx: local SGD on `f_k(y) + mu/2 ||y - theta||^2`.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks",
2020, algorithm 2.
"""

from __future__ import annotations

import torch

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors


class FedProx(LocalAlgorithm):
    """Adds `mu (y - theta)` to every step's gradient, unfiltered.

    `mu = 0` is FedAvg bit for bit, and so is any `mu` with a single local step, where `y = theta`. The step is stable
    on a quadratic of curvature L only while `lr (mu + L) < 2`.
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
