"""The gradient of a client's whole loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.clients.statistics.base import Statistic
from fedspec_dist.core.parameters import with_parameters


class Gradient(Statistic):
    """`(1/n) sum_i grad l_i(theta)`, `[P]`: of the task's loss at the model that the client is sent, over its samples.

    It is not filtered, clipped or decayed. Batches add up weighted by their samples, so it is the mean over samples
    for losses that are means over those of a batch.
    """

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Tensor:
        material, total = self.material, torch.zeros_like(theta)
        at = theta.detach().clone().requires_grad_()
        for _, batch in material.batches(samples):
            loss = material.task.loss(with_parameters(material.module, material.layout, at), batch)
            total.add_(torch.autograd.grad(loss, at)[0], alpha=len(batch) / len(samples))
        return total
