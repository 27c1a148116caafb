"""Krum and Multi-Krum: the updates that lie closest to their neighbours."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.distances import squared_distances
from fedspec_dist.server.protocols import AnyLayers


class Krum(AnyLayers):
    """The one update with the lowest score, the sum of the squared distances to its `K - f - 2` nearest others.

    `f = floor(byzantine K)` of the K clients may be malicious; the paper's guarantee asks for `K >= 2 f + 3`, and with
    fewer clients one neighbour counts. Of equal scores the client of the lowest id is taken: of two clients always the
    first. All clients count alike: the weights are not used.

    Diagnostics: `krum/client`, the id of the one that was taken.

    P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent", NeurIPS 2017, section 4.
    """

    def __init__(self, byzantine: float) -> None:
        self.byzantine = byzantine

    def direction(self, cohort: Cohort) -> Direction:
        place = int(by_score(cohort.updates.gram(), num_byzantine(self.byzantine, cohort.updates.num_rows))[0])
        chosen = torch.zeros(cohort.updates.num_rows, dtype=torch.float64)
        chosen[place] = 1
        return Direction(cohort.updates.combine(chosen), {"krum/client": float(cohort.clients.ids[place])})


class MultiKrum(AnyLayers):
    """The mean of the `keep` updates with the lowest scores of Krum, by default of `K - f`.

    All clients count alike: the weights are not used. `byzantine = 0`: FedAvg with uniform weights, bit for bit.

    Diagnostics: `multi_krum/kept`, how many clients the mean is over.

    P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent", NeurIPS 2017, section 6.
    """

    def __init__(self, byzantine: float, keep: int | None) -> None:
        self.byzantine, self.keep = byzantine, keep

    def direction(self, cohort: Cohort) -> Direction:
        num_clients = cohort.updates.num_rows
        f = num_byzantine(self.byzantine, num_clients)
        kept = num_clients - f if self.keep is None else min(self.keep, num_clients)
        chosen = torch.zeros(num_clients, dtype=torch.float64)
        chosen[by_score(cohort.updates.gram(), f)[:kept]] = 1 / kept
        return Direction(cohort.updates.combine(chosen), {"multi_krum/kept": float(kept)})


def num_byzantine(share: float, num_clients: int) -> int:
    """`floor(share K)` for the decimal number that the config gave."""
    return int(Fraction(str(share)) * num_clients)


def by_score(gram: Tensor, f: int) -> Tensor:
    """Places of the clients, `[K]`, by rising score; equal ones in their order."""
    neighbours = max(len(gram) - f - 2, 1)
    apart = squared_distances(gram).fill_diagonal_(torch.inf)
    # One client alone has no neighbour, and an infinite score.
    return apart.sort(dim=1).values[:, :neighbours].sum(1).argsort(stable=True)
