"""FedProx: local SGD on `f_k(y) + mu/2 ||y - theta||^2`.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks",
2020, algorithm 2.
"""

from __future__ import annotations

import torch

from fedspec_dist.clients.vectors import LocalVectors


class FedProx:
    """Adds `mu (y - theta)` to every step's gradient, unfiltered.

    `mu = 0` is FedAvg bit for bit, and so is any `mu` with a single local step, where `y = theta`. The step is stable
    on a quadratic of curvature L only while `lr (mu + L) < 2`.
    """

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = mu

    def correct(self, vectors: LocalVectors) -> None:
        if self.mu:
            # The difference first: mu*y - mu*theta would not be exactly zero at y = theta.
            torch.sub(vectors.parameters, vectors.anchor, out=vectors.scratch)
            vectors.gradient.add_(vectors.scratch, alpha=self.mu)
