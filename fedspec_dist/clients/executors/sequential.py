"""The sequential executor: one client after the other, each step an ordinary forward and backward pass.

Inside a client nothing waits for the device, and every vector is written into memory that was there before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.parameters import ParameterLayout

_NOTHING: Mapping[str, Tensor] = {}
# [n, C, H, W], index [B], draws [B, 3] or None -> [B, C, H, W]
Gather = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Filter(Protocol):
    """What a local step asks of a gradient filter; see `fedspec_dist.filters`."""

    def prepare(self, round_number: int, seed: int) -> None:
        """Before a client's first step of a round; rounds count from 1."""

    def __call__(self, gradient: Tensor) -> None:
        """Changes `gradient [..., P]` in place."""


@dataclass(frozen=True)
class ClientWork:
    """One client's local training: which samples, in which order, cut into which batches.

    Every random draw of ours was made outside, so the same work gives the same result on any rank. What the model or a
    plugin draws besides comes from global generators, which who calls `train` has keyed.
    """

    samples: Tensor  # [n] int64, the client's positions in the training set, on the device
    order: Tensor  # [number seen] int64, positions in the training set, on the device
    bounds: Sequence[tuple[int, int]]  # of the batches, within `order`
    draws: Tensor | None  # [number seen, 3], of the augmentation
    class_counts: Tensor  # [C] int64, of the client's samples, on the device
    round_number: int  # from 1
    filter_seed: int  # of this client in this round


@dataclass(frozen=True)
class LocalMethods:
    """What happens in a local step after the backward pass, in this order."""

    filter: Filter
    algorithm: LocalAlgorithm
    sgd: LocalSgd


class SequentialExecutor:
    """Trains clients on the module's own parameters, which are views into `vectors.parameters`."""

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        task_loss: Callable[[Tensor, Tensor], Tensor],
        methods: LocalMethods,
        images: Tensor,
        labels: Tensor,
        gather: Gather,
    ) -> None:
        self._module = module
        self._task_loss = task_loss
        self._methods = methods
        self._images, self._labels, self._gather = images, labels, gather
        algorithm, device = methods.algorithm, images.device
        algorithm.bind(layout.segments)
        self.vectors = LocalVectors.allocate(
            len(layout), device, own=algorithm.own, received=algorithm.broadcast, uploads=algorithm.uploads
        )
        self.vectors.parameters.copy_(layout.flatten(module))
        self._bound = layout.bind(module, self.vectors.parameters)
        self._frozen = {name: self._frozen_copy(layout, name) for name in algorithm.frozen_at}
        self._velocity = torch.zeros(len(layout), device=device) if methods.sgd.momentum else None
        self._loss_sum = torch.zeros((), device=device)

    def receive(self, vectors: Mapping[str, Tensor]) -> None:
        """What the server sends beside the model, `[P]` each, for the clients of a round."""
        for name, vector in vectors.items():
            self.vectors.received[name].copy_(vector)

    def train(
        self,
        work: ClientWork,
        theta: Tensor,
        lr: float,
        update: Tensor,
        *,
        own: Tensor | None = None,
        uploads: Mapping[str, Tensor] = _NOTHING,
    ) -> Tensor:
        """Train one client from `theta [P]` and write `y - theta` into `update [P]`.

        `own [S, P]` is what the client kept, None if it has not taken part before; what it keeps now can be had from
        `kept` until the next call. `uploads` has a row `[P]` for each vector that the method sends beside the update.
        Returns `[mean loss, share of the first gradient's energy that the filter removed, largest entry of the
        update and of all that is sent or kept besides]` on the device, float64; the last is not finite when any of
        them is not.
        """
        vectors, methods = self.vectors, self._methods
        vectors.parameters.copy_(theta)
        vectors.anchor.copy_(theta)
        for place, vector in enumerate(vectors.own.values()):
            vector.zero_() if own is None else vector.copy_(own[place])
        if self._velocity is not None:
            self._velocity.zero_()
        self._loss_sum.zero_()
        methods.filter.prepare(work.round_number, work.filter_seed)
        client = self._client(work, lr, own is None)
        methods.algorithm.begin(vectors, client)
        removed = self._loss_sum.new_zeros(())
        for step, (start, stop) in enumerate(work.bounds):
            losses: list[Tensor] = []
            inputs, labels = self._batch(work, start, stop)
            methods.algorithm.gradient(vectors, partial(self._backward, inputs, labels, client, losses), client)
            self._loss_sum.add_(losses[0], alpha=stop - start)  # at y; a method may differentiate elsewhere as well
            if step == 0:
                removed = self._filter_measured()
            else:
                methods.filter(vectors.gradient)
            methods.algorithm.correct(vectors)
            methods.sgd.step(vectors, self._velocity, lr)
        torch.sub(vectors.parameters, theta, out=update)
        methods.algorithm.end(vectors, update, client)
        for name, vector in vectors.uploads.items():
            uploads[name].copy_(vector)
        largest = torch.stack([largest_entry(v) for v in (update, *vectors.own.values(), *vectors.uploads.values())])
        num_samples = max(len(work.order), 1)
        return torch.stack([self._loss_sum / num_samples, removed, largest.amax()]).double()

    def kept(self) -> Tensor:
        """A copy of what the client that was trained last keeps, `[S, P]`."""
        return torch.stack(list(self.vectors.own.values()))

    def _client(self, work: ClientWork, lr: float, is_new: bool) -> Client:
        algorithm, num_steps = self._methods.algorithm, len(work.bounds)
        return Client(
            task_loss=self._task_loss,
            lr=lr,
            num_steps=num_steps,
            effective_steps=algorithm.effective_steps(num_steps, lr, self._methods.sgd.momentum),
            class_counts=work.class_counts,
            is_new=is_new,
            frozen=self._frozen,
            filter=self._methods.filter,
            full_gradient=lambda out: self._full_gradient(work, out),
        )

    def _frozen_copy(self, layout: ParameterLayout, name: str) -> nn.Module:
        twin = copy.deepcopy(self._module)
        layout.bind(twin, self.vectors.anchor if name == "anchor" else self.vectors.own[name])
        return twin.requires_grad_(False).eval()

    def _batch(self, work: ClientWork, start: int, stop: int) -> tuple[Tensor, Tensor]:
        index = work.order[start:stop]
        draws = None if work.draws is None else work.draws[start:stop]
        return self._gather(self._images, index, draws), self._labels.index_select(0, index)

    def _backward(self, inputs: Tensor, labels: Tensor, client: Client, losses: list[Tensor]) -> None:
        """The gradient of one batch's loss, into `vectors.gradient`; the loss, onto `losses`."""
        loss = self._methods.algorithm.loss(self._module, inputs, labels, client)
        gradients = torch.autograd.grad(loss, self._bound, allow_unused=True, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.vectors.gradient)
        losses.append(loss.detach())

    def _full_gradient(self, work: ClientWork, out: Tensor) -> None:
        """The filtered mean gradient of the task's loss over the client's samples, each once, not augmented.

        The model is in training mode, with dropout, if it has any: what the local steps follow has the same mean.
        """
        out.zero_()
        for index in work.samples.split(max((stop - start for start, stop in work.bounds), default=1)):
            inputs, labels = self._gather(self._images, index, None), self._labels.index_select(0, index)
            loss = self._task_loss(self._module(inputs), labels)
            gradients = torch.autograd.grad(loss, self._bound, allow_unused=True, materialize_grads=True)
            out.add_(torch.cat([g.reshape(-1) for g in gradients]), alpha=len(index) / len(work.samples))
        self._methods.filter(out)

    def _filter_measured(self) -> Tensor:
        before = torch.linalg.vector_norm(self.vectors.gradient).square()
        self._methods.filter(self.vectors.gradient)
        after = torch.linalg.vector_norm(self.vectors.gradient).square()
        return torch.where(before > 0, 1 - after / before, 0.0)


def largest_entry(vector: Tensor) -> Tensor:
    """The largest absolute value, a scalar; NaN where there is a NaN."""
    low, high = torch.aminmax(vector)
    return torch.maximum(-low, high)
