"""FedAWA: weights learned from the clients' updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.distances import inner
from fedspec_dist.server.protocols import Weights

# What the released program gives each optimizer: lr and weight decay.
RELEASED = {"adam": (0.001, 0.0), "sgd": (0.01, 5e-4)}
# Of so many clients the Gram matrix is asked for. Of more, it would take more memory and messages than what it saves.
_FEW = 1024
# Below this share of the largest squared norm, a squared distance is rounding of the Gram matrix.
_NO_DISTANCE = 1e-13


class FedAwa:
    """`w = softmax(T)` over the round's clients, where a few steps of an optimizer have lowered

        L(T) = sum_k w_k (1 - cos(theta, y_k)) + sum_k w_k || u_k - sum_j w_j u_j ||        y_k = theta + u_k

    The logits `T` of all N clients are kept between rounds, by client; they start as the shares `n_k / N_total` of the
    samples (not their logarithms), so `w` differs from the shares of the samples even with `server_epochs = 0`. Equal
    sizes start uniform. The optimizer is new in every round: `adam` with betas 0.5 and 0.999, or `sgd` with momentum
    0.9; `lr` and `weight_decay` of None are those in `RELEASED`.

    The weights of a round are those after its last step. The released program aggregates with those that the last step
    started from, so that with one epoch what a round learns first counts in the next: `stale=True`. It also reads the
    logits by position in the cohort and not by client, which is not copied, and has another first term
    (`reg_distance`), which is left out.

    One client, or equal updates: no gradient, so only weight decay changes `T`.

    Diagnostics, of the last step's loss: `fedawa/cosine_loss` and `fedawa/distance_loss`, its two terms.

    C. Shi et al., "FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client Vectors",
    CVPR 2025, and its released program.
    """

    def __init__(
        self,
        optimizer: str,
        lr: float | None,
        weight_decay: float | None,
        server_epochs: int,
        stale: bool,
    ) -> None:
        released_lr, released_decay = RELEASED[optimizer]
        lr = released_lr if lr is None else lr
        weight_decay = released_decay if weight_decay is None else weight_decay
        self.optimizer, self.lr, self.weight_decay = optimizer, lr, weight_decay
        self.server_epochs, self.stale = server_epochs, stale

    def initial_state(self, num_samples: Tensor) -> dict[str, Tensor]:
        """`logits [N]`: the shares of the samples of all clients."""
        counts = num_samples.to(torch.float64)
        return {"logits": counts / counts.sum()}

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        vectors = ClientVectors.of(cohort)
        logits = state["logits"][cohort.clients.ids].requires_grad_()
        optimizer = self._new_optimizer(logits)
        before = after = logits.detach().softmax(0)
        for _ in range(self.server_epochs):
            before = after
            optimizer.zero_grad()
            with torch.enable_grad():
                cosine, distance = vectors.losses(logits.softmax(0))
                (cosine + distance).backward()
            optimizer.step()
            after = logits.detach().softmax(0)
        state["logits"][cohort.clients.ids] = logits.detach()
        cosine, distance = vectors.losses(before)
        diagnostics = {"fedawa/cosine_loss": float(cosine), "fedawa/distance_loss": float(distance)}
        return Weights(before if self.stale else after, diagnostics=diagnostics)

    def _new_optimizer(self, logits: Tensor) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam([logits], lr=self.lr, betas=(0.5, 0.999), weight_decay=self.weight_decay)
        return torch.optim.SGD([logits], lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class ClientVectors:
    """What the loss needs of the updates `u_k [P]` and of `theta [P]`, all float64."""

    squared: Tensor  # [K], u_k . u_k
    along_mean: Callable[[Tensor], Tensor]  # w [K] -> u_k . sum_j w_j u_j, [K]
    along: Tensor  # [K], u_k . theta
    squared_norm: float  # theta . theta

    @classmethod
    def of(cls, cohort: Cohort) -> ClientVectors:
        updates = cohort.updates
        along, squared_norm = updates.dot(cohort.slicing.slice(cohort.theta)), inner(cohort.theta, cohort.theta)
        if updates.num_rows <= _FEW:
            gram = updates.gram()
            return cls(gram.diagonal(), lambda w: (gram * w).sum(1), along, squared_norm)

        def along_mean(w: Tensor) -> Tensor:
            product: Tensor = _Symmetric.apply(w, lambda vector: updates.dot(updates.combine(vector)))
            return product

        return cls(updates.norms().square(), along_mean, along, squared_norm)

    def losses(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The two terms of `L` at the weights `w [K]`."""
        return (w * (1 - self.cosines())).sum(), (w * self.distances(w)).sum()

    def cosines(self) -> Tensor:
        """`cos(theta, theta + u_k)`, `[K]`; 0 where one of them is zero."""
        squared = (self.squared_norm + 2 * self.along + self.squared).clamp(min=0)
        return (self.squared_norm + self.along) / (sqrt(self.squared_norm) * squared.sqrt()).clamp(min=1e-8)

    def distances(self, w: Tensor) -> Tensor:
        """`|| u_k - sum_j w_j u_j ||`, `[K]`, with gradient 0 where it is 0."""
        mean = self.along_mean(w)
        squared = self.squared - 2 * mean + (w * mean).sum()
        apart = squared > _NO_DISTANCE * self.squared.max()
        return torch.where(apart, squared, 1.0).sqrt() * apart


class _Symmetric(torch.autograd.Function):
    """A product with a symmetric matrix, which is also the product that its derivative needs."""

    @staticmethod
    def forward(context: Any, w: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        context.product = product
        return product(w)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.product(gradient), None
