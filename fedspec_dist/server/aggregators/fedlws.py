"""FedLWS: the aggregated model shrunk layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.core.parameters import Segment
from fedspec_dist.server.distances import inner
from fedspec_dist.server.protocols import AnyLayers

# Of so many clients every layer's Gram matrix is asked for. Of more, they would take more memory and messages than they
# save.
_FEW = 256


class FedLws(AnyLayers):
    """For each layer `l`, the next model is `gamma_l (theta_l + d_l)` with `d = sum_k w_k u_k`:

        tau_l   = clip(beta * mean_k || u_k,l - mean_j u_j,l ||, min_tau, max_tau)
        gamma_l = || theta_l || / (|| theta_l || + tau_l || d_l ||)

    The model is shrunk, not the update, so the direction is `gamma d + (gamma - 1) theta`. Layers are `layer_groups`;
    the mean in `tau` is over clients, unweighted. `min_tau = max_tau = 0` is FedAvg bit for bit; `beta = 0` is not, nor
    are one client or equal updates: `tau` is then `min_tau`. A layer that does not move keeps `gamma = 1`; one that is
    zero and moves is set to zero by the formula, unless `tau` is 0.

    Diagnostics: `fedlws/gamma_mean` and `fedlws/gamma_min`, over the layers.

    C. Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, and its released
    program, which cuts layers after every bias; here a layer is a module with its norm.
    """

    def __init__(self, beta: float, min_tau: float, max_tau: float) -> None:
        self.beta, self.min_tau, self.max_tau = beta, min_tau, max_tau

    def direction(self, cohort: Cohort) -> Direction:
        assert cohort.segments, "fedlws needs to know the layers"
        bounds = layer_groups(cohort.segments)
        update = cohort.updates.combine(cohort.weights)
        if cohort.updates.num_rows <= _FEW:
            grams = cohort.updates.segment_grams(bounds)
            distances, norms = mean_distances(grams), update_norms(grams, cohort.weights)
        else:
            distances = _distances_from_the_mean(cohort, bounds)
            norms = layer_norms(cohort.slicing.whole(update), bounds)
        tau = (self.beta * distances).clamp(self.min_tau, self.max_tau)
        gamma = shrinking(layer_norms(cohort.theta, bounds), tau, norms)
        scale = cohort.slicing.slice(spread(gamma, bounds).to(update))
        theta = cohort.slicing.slice(cohort.theta).double()
        diagnostics = {"fedlws/gamma_mean": float(gamma.mean()), "fedlws/gamma_min": float(gamma.min())}
        return Direction(scale * update + (scale - 1) * theta, diagnostics)


def layer_groups(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """`[start, stop)` of each layer: a module's tensors, with those of the norm that follows it.

    A norm is a module whose weight has one dimension. Where a norm does not follow another kind of module, it is a
    layer by itself.
    """
    layers: list[list[Segment]] = []
    for _, module in groupby(segments, key=lambda segment: segment.name.rpartition(".")[0]):
        tensors = list(module)
        if layers and _has_norm(tensors) and not _has_norm(layers[-1]):
            layers[-1] += tensors
        else:
            layers.append(tensors)
    return [(tensors[0].start, tensors[-1].stop) for tensors in layers]


def _has_norm(tensors: Sequence[Segment]) -> bool:
    return any(s.name.rpartition(".")[2] == "weight" and len(s.shape) == 1 for s in tensors)


def mean_distances(grams: Tensor) -> Tensor:
    """`mean_k || u_k - mean_j u_j ||`, `[L]`, from `grams [L, K, K]`."""
    squared = grams.diagonal(dim1=1, dim2=2) - 2 * grams.mean(2) + grams.mean((1, 2)).unsqueeze(1)
    return squared.clamp(min=0).sqrt().mean(1)


def _distances_from_the_mean(cohort: Cohort, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """The same without a matrix of the clients: from each row's products with itself and with the mean."""
    num = cohort.updates.num_rows
    mean = cohort.updates.combine(torch.full((num,), 1 / num, dtype=torch.float64))
    along = cohort.updates.segment_dots(bounds, mean)  # [L, K]
    squared = cohort.updates.segment_squares(bounds) - 2 * along + along.mean(1, keepdim=True)
    return squared.clamp(min=0).sqrt().mean(1)


def update_norms(grams: Tensor, weights: Tensor) -> Tensor:
    """`|| sum_k w_k u_k ||`, `[L]`."""
    return (weights.unsqueeze(1) * grams * weights).sum((1, 2)).clamp(min=0).sqrt()


def layer_norms(theta: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """`|| theta_l ||`, `[L]` float64."""
    squared = [inner(theta[start:stop], theta[start:stop]) for start, stop in bounds]
    return torch.tensor(squared, dtype=torch.float64).sqrt()


def shrinking(norms: Tensor, tau: Tensor, updates: Tensor) -> Tensor:
    """`gamma = norm / (norm + tau * update)`, `[L]`; 1 where both are zero."""
    grown = tau * updates
    return torch.where(grown > 0, norms / (norms + grown), 1.0)


def spread(gamma: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """`gamma_l` at every column of layer l: `[P]`."""
    return gamma.repeat_interleave(torch.tensor([stop - start for start, stop in bounds]))
