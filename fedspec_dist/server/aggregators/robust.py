"""Robust aggregation: what a few malicious or broken clients cannot carry away."""

from __future__ import annotations

from fractions import Fraction
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.distances import distances_to, squared_distances
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


# Coefficients that change less, in sum, have converged.
_CONVERGED = 1e-12


class GeometricMedian(AnyLayers):
    """The point v that lowers `sum_k w_k ||v - u_k||`, by Weiszfeld's iteration with smoothing, from the weighted mean:

        b_k = w_k / max(smoothing, ||v - u_k||)        v <- sum_k b_k u_k / sum_k b_k

    at most `iterations` times. All of them take place in the coefficients of v, so that the updates are read twice:
    for their Gram matrix and for the result. The weights are used: the breakdown point is half of them, not half of the
    clients. A `smoothing` above all distances, one client or equal updates: FedAvg up to rounding.

    Diagnostics: `geometric_median/iterations`, and `geometric_median/largest`, the largest coefficient of a client.

    K. Pillutla, S. M. Kakade, Z. Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal
    Processing 2022, algorithm 2 (number from memory). There an iteration is a round of messages, and three are made.
    """

    def __init__(self, smoothing: float, iterations: int) -> None:
        self.smoothing, self.iterations = smoothing, iterations

    def direction(self, cohort: Cohort) -> Direction:
        coefficients, steps = weiszfeld(cohort.updates.gram(), cohort.weights, self.smoothing, self.iterations)
        diagnostics = {
            "geometric_median/iterations": float(steps),
            "geometric_median/largest": float(coefficients.max()),
        }
        return Direction(cohort.updates.combine(coefficients), diagnostics)


def weiszfeld(gram: Tensor, weights: Tensor, smoothing: float, iterations: int) -> tuple[Tensor, int]:
    """Coefficients `[K]` of the point, summing to 1, and the number of steps that were made."""
    coefficients, steps, change = weights, 0, inf
    while steps < iterations and change > _CONVERGED:
        closeness = weights / distances_to(gram, coefficients).clamp(min=smoothing)
        before, coefficients, steps = coefficients, closeness / closeness.sum(), steps + 1
        change = float((coefficients - before).abs().sum())
    return coefficients, steps


class CenteredClipping(AnyLayers):
    """The mean of the updates, each shortened around what the last round came to.

    From the direction of the last round, `v = v_last` (0 at first, and where a phase begins), so many times

        v <- v + sum_k w_k (u_k - v) min(1, radius / ||u_k - v||)

    The weights are used; the paper's are equal. One malicious client moves the direction by at most `w_k radius` an
    iteration. A `radius` above all distances: FedAvg up to rounding; a small one needs rounds, or iterations, to come
    to where the clients are, also with one client or equal updates.

    In the paper, which has the same workers in every step, they send momenta. Clients that come and go have none; the
    local methods `fedcm` and `mofedsam` have the server's enter every step.

    Diagnostics: `centered_clipping/clipped`, the share of clients that the last iteration shortened.

    S. P. Karimireddy, L. He, M. Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021,
    algorithm 2 (number from memory).
    """

    memory: ClassVar[tuple[str, ...]] = ("centre",)

    def __init__(self, radius: float, iterations: int) -> None:
        self.radius, self.iterations = radius, iterations

    def direction(self, cohort: Cohort) -> Direction:
        updates, last = cohort.updates, cohort.memory["centre"]
        centre = cohort.slicing.rows(last.unsqueeze(0))
        along = updates.inner(centre)
        gram = torch.cat([torch.cat([updates.gram(), along], dim=1), torch.cat([along.T, centre.gram()], dim=1)])
        coefficients, clipped = clipped_mean(gram, cohort.weights, self.radius, self.iterations)
        direction = updates.combine(coefficients[:-1]) + float(coefficients[-1]) * last
        last.copy_(direction)
        return Direction(direction, {"centered_clipping/clipped": clipped})


def clipped_mean(gram: Tensor, weights: Tensor, radius: float, iterations: int) -> tuple[Tensor, float]:
    """Coefficients `[K + 1]` of v, and the share of clients shortened last, from the Gram matrix of the K updates and
    the centre, `[K + 1, K + 1]`, the centre last."""
    coefficients = torch.zeros_like(gram[0])
    coefficients[-1] = 1
    for _ in range(iterations):
        apart = distances_to(gram, coefficients)[:-1]
        steps = weights * torch.where(apart > radius, radius / apart, 1.0)
        coefficients = coefficients * (1 - steps.sum())
        coefficients[:-1] += steps
    return coefficients, float((apart > radius).double().mean())
