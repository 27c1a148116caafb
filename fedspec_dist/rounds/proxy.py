"""The server's own samples, for weights that are learned on such: the gradient of the loss at any model.

One rank computes it and sends it: kernels of a GPU may add in any order, and ranks that each computed their own would
learn different weights and put one model together from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspec_dist.core import seeding
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.parameters import ParameterLayout, with_parameters
from fedspec_dist.data.dataset import Examples
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.models.network import evaluating
from fedspec_dist.tasks.base import Task


@dataclass(frozen=True)
class ServerProxy:
    """In one round; see `cohort.Proxy`. The model is in eval mode."""

    module: nn.Module
    layout: ParameterLayout
    task: Task
    examples: Examples
    batch_size: int
    seed: int
    round_index: int
    collectives: Collectives  # of the ranks that work on the round's matrix

    def batches(self, epoch: int) -> Sequence[Tensor]:
        """Positions of the samples of each batch, in a new order each epoch."""
        order = seeding.generator(self.seed, "proxy batches", self.round_index, epoch).permutation(len(self.examples))
        return torch.from_numpy(order).to(self.examples.inputs[0].device).split(self.batch_size)

    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        """Of the mean loss over a batch at the parameters `theta [P]`: `[P]`."""
        gradient = torch.zeros_like(theta)
        if self.collectives.rank == 0:
            gradient = self._gradient(theta.detach().requires_grad_(), batch)
        return self.collectives.broadcast(gradient, "broadcast of the gradient on the server's samples")

    def _gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        draws = keyed(theta.device, self.seed, "proxy", self.round_index)
        with torch.enable_grad(), evaluating(self.module), draws:
            model = with_parameters(self.module, self.layout, theta)
            loss = self.task.loss(model, self.examples.batch(batch))
        return torch.autograd.grad(loss, theta)[0]
