"""Sharpness-aware local steps (FedSAM), the server's momentum in every step (FedCM), and both (MoFedSAM)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.core.parameters import Segment

# Keeps the ascent at g = 0 at zero; FedDecorr's program and the sam library have the same.
_EPSILON = 1e-12


class FedSAM(LocalAlgorithm):
    """Sharpness-aware local steps.

    The gradient of a step is taken where the loss is worse, on the same batch:

        e = rho g / (||g|| + 1e-12)            g the gradient at y, the norm over all parameters
        the step follows the gradient at y + e

    `adaptive` (ASAM) scales by the parameters' size, with `T = |y| + eta` for the tensors whose name contains "weight"
    and `T = 1` for the others:

        e = rho T^2 g / (||T g|| + 1e-12)

    The gradient that is followed is filtered; with `filter_ascent` so is the one that is climbed, before it is scaled
    and its length taken. Costs two passes a step. Default rho: FL-Simulator; for ASAM, Caldarola et al. take rho 0.7
    and eta 0.2 on CIFAR-10.

    `rho = 0` is FedAvg bit for bit, in one pass. At a gradient of zero the ascent is zero. A single step of all clients
    is a SAM step, not FedAvg's.

    Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu, "Generalized Federated Learning via Sharpness Aware Minimization",
    ICML 2022, algorithm 1; the adaptive form D. Caldarola, B. Caputo, M. Ciccone, "Improving Generalization in
    Federated Learning by Seeking Flat Minima", ECCV 2022, in the form of the authors' program.
    """

    def __init__(self, rho: float, adaptive: bool, eta: float, filter_ascent: bool) -> None:
        self.rho = rho
        self.adaptive = adaptive
        self.eta = eta
        self.filter_ascent = filter_ascent
        self.passes = 2.0 if rho else 1.0
        self._unscaled = torch.zeros(0, dtype=torch.bool)  # [P], where T = 1

    def bind(self, segments: Sequence[Segment]) -> None:
        if self.adaptive:
            self._unscaled = torch.cat([torch.full((s.size,), "weight" not in s.name) for s in segments])

    def begin(self, vectors: LocalVectors, client: Client) -> None:
        self._unscaled = self._unscaled.to(vectors.parameters.device)

    def gradient(self, vectors: LocalVectors, backward: Callable[[], None], client: Client) -> None:
        backward()
        if not self.rho:
            return
        if self.filter_ascent:
            assert client.filter is not None
            client.filter(vectors.gradient)
        # A copy, since y + e - e is not y in floating point.
        kept = vectors.scratch.copy_(vectors.parameters)
        torch.add(kept, self._ascent(vectors), out=vectors.parameters)
        backward()
        vectors.parameters.copy_(kept)

    def _ascent(self, vectors: LocalVectors) -> Tensor:
        """`e [..., P]`, in the gradient's place; uses the parameters' memory as well."""
        ascent = vectors.gradient
        if not self.adaptive:
            return ascent.mul_(self.rho / (_norm(ascent) + _EPSILON))
        scales = vectors.parameters.abs_().add_(self.eta).masked_fill_(self._unscaled, 1.0)
        norm = _norm(ascent.mul_(scales))
        return ascent.mul_(scales).mul_(self.rho / (norm + _EPSILON))


def _norm(vector: Tensor) -> Tensor:  # [..., P] -> [..., 1]
    return torch.linalg.vector_norm(vector, dim=-1, keepdim=True)


class FedCM(LocalAlgorithm):
    """The server's momentum enters every client's step.

    Every step follows `alpha g + (1 - alpha) m`, where `m`, 0 at first, is the same for all clients of a round.

    After the round, with the clients' weights `w_k`, the round's learning rate and the effective steps `a_k`

        m <- -sum_k w_k (y_k - theta) / (lr a_k)

    Weight decay is added after the mixture and not scaled by alpha; as part of the update, it also enters `m`.

    `alpha = 1` is FedAvg bit for bit. The first round is FedAvg with `lr alpha`. With one local step of all clients,
    `m` is an exponential average of the mean gradients. Zero updates make `m` zero.

    J. Xu, S. Wang, L. Wang, A. C.-C. Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, arXiv
    2106.10874, algorithm 2, in the form of FL-Simulator's program (the authors' could not be read).
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


class MoFedSAM(FedSAM, FedCM):
    """Sharpness-aware local steps with the server's momentum.

    Every step follows `alpha g + (1 - alpha) m`: FedSAM's `g`, at `y + e`, in FedCM's mixture and with its `m`.

    The ascent `e` follows the loss itself, not the mixture; `filter_ascent` is FedSAM's. `alpha = 1` is FedSAM and
    `rho = 0` is FedCM, bit for bit.

    FedSAM's paper, algorithm 2.
    """

    def __init__(self, alpha: float, rho: float, filter_ascent: bool) -> None:
        FedCM.__init__(self, alpha)
        FedSAM.__init__(self, rho, adaptive=False, eta=0.0, filter_ascent=filter_ascent)
