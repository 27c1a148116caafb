"""The coordinate-wise trimmed mean."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers


class TrimmedMean(AnyLayers):
    """For every parameter the mean of the clients' updates without the `floor(trim K)` largest and as many smallest.

    All clients count alike: the weights are not used. `trim = 0`, or too few clients to cut one: FedAvg with uniform
    weights, up to rounding.

    Diagnostics: `trimmed_mean/cut`, the number cut on each side.

    D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018, definition 2 and algorithm 1.
    """

    def __init__(self, trim: float) -> None:
        self.trim = trim

    def direction(self, cohort: Cohort) -> Direction:
        cut = num_cut(self.trim, cohort.updates.num_rows)
        merged = cohort.updates.columnwise(lambda updates: trimmed_mean(updates, cut))
        return Direction(merged, {"trimmed_mean/cut": float(cut)})


def num_cut(trim: float, num_clients: int) -> int:
    """`floor(trim K)` for the decimal number that the config gave: 0.29 of 100 is 29, though its float is less."""
    return int(Fraction(str(trim)) * num_clients)


def trimmed_mean(updates: Tensor, cut: int) -> Tensor:
    """Of each column of `[K, n]`, without its `cut` largest and `cut` smallest entries: `[n]`."""
    return updates.sort(dim=0).values[cut : len(updates) - cut].mean(0)
