"""Weights from the numbers of samples alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.protocols import Weights


class Stateless:
    """A weighting without memory and without samples of the server's own."""

    def initial_state(self, num_samples: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}


class Uniform(Stateless):
    """`1 / K` for every client, however many samples it has."""

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        return Weights(torch.full_like(cohort.weights, 1 / len(cohort.weights)))


class Samples(Stateless):
    """`n_k / sum_j n_j`, each client's share of the cohort's samples.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, algorithm 1.
    """

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        return Weights(cohort.clients.shares)
