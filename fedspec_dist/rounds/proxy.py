"""The server's own samples, for weights that are learned on such: the gradient of the loss at any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspec_dist import seeding
from fedspec_dist.fisher.products import Forward


@dataclass(frozen=True)
class ServerProxy:
    """In one round; see `cohort.Proxy`. Every rank that works computes the same: the samples are few."""

    forward: Forward
    task_loss: Callable[[Tensor, Tensor], Tensor]
    images: Tensor
    labels: Tensor
    batch_size: int
    seed: int
    round_index: int

    def batches(self, epoch: int) -> Sequence[Tensor]:
        """Positions of the samples of each batch, in a new order each epoch."""
        order = seeding.generator(self.seed, "proxy batches", self.round_index, epoch).permutation(len(self.labels))
        return torch.from_numpy(order).to(self.labels.device).split(self.batch_size)

    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        """Of the mean loss over a batch at the parameters `theta [P]`: `[P]`."""
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self.forward(theta, self.images.index_select(0, batch))
            loss = self.task_loss(outputs, self.labels.index_select(0, batch))
        return torch.autograd.grad(loss, theta)[0]
