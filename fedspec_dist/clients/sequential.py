"""The sequential executor: one client after the other, each step an ordinary forward and backward pass.

Inside a client nothing waits for the device, and every vector is written into memory that was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspec_dist.clients.sgd import LocalSgd
from fedspec_dist.clients.vectors import LocalAlgorithm, LocalVectors
from fedspec_dist.parameters import ParameterLayout

# [n, C, H, W], index [B], draws [B, 3] or None -> [B, C, H, W]
Gather = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class ClientWork:
    """One client's local training: which samples, in which order, cut into which batches.

    Every random draw was made outside, so the same work gives the same result on any rank.
    """

    order: Tensor  # [num_samples * epochs] int64, positions in the training set, on the device
    bounds: Sequence[tuple[int, int]]  # of the batches, within `order`
    draws: Tensor | None  # [num_samples * epochs, 3], of the augmentation


@dataclass(frozen=True)
class LocalMethods:
    """What happens in a local step after the backward pass, in this order."""

    filter: Callable[[Tensor], None]
    algorithm: LocalAlgorithm
    sgd: LocalSgd


class SequentialExecutor:
    """Trains clients on the module's own parameters, which are views into `vectors.parameters`."""

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        loss: Callable[[Tensor, Tensor], Tensor],
        methods: LocalMethods,
        images: Tensor,
        labels: Tensor,
        gather: Gather,
    ) -> None:
        self._module = module
        self._loss = loss
        self._methods = methods
        self._images, self._labels, self._gather = images, labels, gather
        device = images.device
        self.vectors = LocalVectors.allocate(len(layout), device)
        self.vectors.parameters.copy_(layout.flatten(module))
        self._bound = layout.bind(module, self.vectors.parameters)
        self._velocity = torch.zeros(len(layout), device=device) if methods.sgd.momentum else None
        self._loss_sum = torch.zeros((), device=device)

    def train(self, work: ClientWork, theta: Tensor, lr: float, update: Tensor) -> Tensor:
        """Train one client from `theta [P]` and write `y - theta` into `update [P]`.

        Returns `[mean loss, share of the first gradient's energy that the filter removed, largest entry of the
        update]` on the device, float64; the last is not finite when the update is not.
        """
        vectors, methods = self.vectors, self._methods
        vectors.parameters.copy_(theta)
        vectors.anchor.copy_(theta)
        if self._velocity is not None:
            self._velocity.zero_()
        self._loss_sum.zero_()
        removed = self._loss_sum.new_zeros(())
        for step, (start, stop) in enumerate(work.bounds):
            self._backward(work, start, stop)
            if step == 0:
                removed = self._filter_measured()
            else:
                methods.filter(vectors.gradient)
            methods.algorithm.correct(vectors)
            methods.sgd.step(vectors, self._velocity, lr)
        torch.sub(vectors.parameters, theta, out=update)
        low, high = torch.aminmax(update)
        num_samples = max(len(work.order), 1)
        return torch.stack([self._loss_sum / num_samples, removed, torch.maximum(-low, high)]).double()

    def _backward(self, work: ClientWork, start: int, stop: int) -> None:
        """The gradient of one batch's mean loss, into `vectors.gradient`."""
        index = work.order[start:stop]
        draws = None if work.draws is None else work.draws[start:stop]
        inputs = self._gather(self._images, index, draws)
        loss = self._loss(self._module(inputs), self._labels.index_select(0, index))
        gradients = torch.autograd.grad(loss, self._bound, allow_unused=True, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.vectors.gradient)
        self._loss_sum.add_(loss.detach(), alpha=stop - start)

    def _filter_measured(self) -> Tensor:
        before = torch.linalg.vector_norm(self.vectors.gradient).square()
        self._methods.filter(self.vectors.gradient)
        after = torch.linalg.vector_norm(self.vectors.gradient).square()
        return torch.where(before > 0, 1 - after / before, 0.0)
