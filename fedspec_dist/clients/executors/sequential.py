"""The sequential executor: one client after the other, each step an ordinary forward and backward pass.

Inside a client nothing waits for the device, and every vector is written into memory that was there before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import Client
from fedspec_dist.clients.executors.base import (
    BatchOf,
    ClientReport,
    ClientWork,
    Kept,
    Rows,
    Sent,
    Statistics,
    largest_entry,
)
from fedspec_dist.clients.step import LocalMethods, local_step
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.buffers import MovingBuffers
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.parameters import ParameterLayout


class SequentialExecutor:
    """Trains clients on the module's own parameters, which are views into `vectors.parameters`."""

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        task: Any,
        methods: LocalMethods,
        batch_of: BatchOf,
        kept: Kept,
        buffers: MovingBuffers | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self._module = module
        self._layout = layout
        self._task = task
        self._methods = methods
        self._batch_of = batch_of
        self._kept = kept
        self._buffers = buffers
        self._statistics = statistics
        algorithm = methods.algorithm
        algorithm.bind(layout.segments)
        theta = layout.flatten(module)
        self.vectors = LocalVectors.allocate(
            len(layout),
            theta.device,
            theta.dtype,
            own=algorithm.own,
            received=algorithm.broadcast,
            uploads=algorithm.uploads,
        )
        self.vectors.parameters.copy_(theta)
        self._bound = layout.bind(module, self.vectors.parameters)
        self._frozen = {name: self._frozen_copy(layout, name) for name in algorithm.frozen_at}
        self._state = methods.optimizer.initial_state(theta)
        self._loss_sum = theta.new_zeros(())
        self._no_buffers = theta.new_zeros(0)

    def show(self, theta: Tensor, buffers: Tensor | None) -> None:
        self.vectors.parameters.copy_(theta)
        if self._buffers is not None and buffers is not None:
            self._buffers.write(buffers)

    def train(self, sent: Sent, work: Iterable[ClientWork], rows: Rows, stop: Callable[[], bool]) -> list[ClientReport]:
        for name, vector in sent.vectors.items():
            self.vectors.received[name][: len(vector)].copy_(vector)
        reports: list[ClientReport] = []
        for place, client in enumerate(work):
            if stop():
                break
            with keyed(sent.theta.device, sent.seed, "client", sent.round_index, client.client):
                reports.append(self._train(sent, client, rows, place))
        return reports

    def _train(self, sent: Sent, work: ClientWork, rows: Rows, place: int) -> ClientReport:
        self._begin(sent, work)
        before = [] if self._statistics is None else self._statistics.before(work, sent, rows, place)
        loss, removed = self._steps(sent, work)
        vectors, num_shared = self.vectors, self._layout.num_shared
        update = rows.updates[place, :num_shared]
        if num_shared == len(self._layout):
            torch.sub(vectors.parameters, vectors.anchor, out=update)
            whole = update
        else:
            whole = vectors.parameters - vectors.anchor
            update.copy_(whole[:num_shared])
        self._methods.algorithm.end(vectors, whole, self._client(sent, work))
        for name, vector in vectors.uploads.items():
            if name in rows.short:
                rows.short[name][place].copy_(vector)
            else:
                rows.uploads[name][place, :num_shared].copy_(vector[:num_shared])
        buffers = self._no_buffers if self._buffers is None else self._buffers.read(vectors.parameters)
        if rows.buffers is not None:
            rows.buffers[place].copy_(buffers[: rows.buffers.shape[1]])
        seen = [update, *vectors.own.values(), *vectors.uploads.values(), *([buffers] if len(buffers) else [])]
        seen += [vectors.parameters[start:stop] for start, stop in self._kept.ranges]
        largest = torch.stack([largest_entry(vector) for vector in seen]).amax()
        kept = self._kept.pack(vectors.own.values(), vectors.parameters, buffers) if self._kept.size else None
        after = [] if self._statistics is None else self._statistics.after(work, sent, rows, place)
        num_samples = max(sum(stop - start for start, stop in work.bounds), 1)
        report = ClientReport.of(loss / num_samples, removed, largest, kept)
        return report.with_largest(*before, *after) if before or after else report

    def _begin(self, sent: Sent, work: ClientWork) -> None:
        """The vectors and the module as the client starts: the global model, with what it keeps of its own."""
        vectors = self.vectors
        vectors.parameters.copy_(sent.theta)
        if self._buffers is not None and sent.buffers is not None:
            self._buffers.write(sent.buffers)
        own: Tensor | None = None
        if work.state is not None and self._kept.size:
            own, _, buffers = self._kept.unpack(work.state)
            self._kept.place(work.state, vectors.parameters)
            if self._buffers is not None and len(buffers):
                self._buffers.write(buffers)
        vectors.anchor.copy_(vectors.parameters)
        for place, vector in enumerate(vectors.own.values()):
            vector.zero_() if own is None else vector.copy_(own[place])
        for vector in vectors.uploads.values():
            vector.zero_()

    def _steps(self, sent: Sent, work: ClientWork) -> tuple[Tensor, Tensor]:
        """All local steps: the sum of the losses over samples, and the share of energy that the filter removed."""
        vectors, methods = self.vectors, self._methods
        for remembered in self._state.values():
            remembered.zero_()
        self._loss_sum.zero_()
        methods.filter.prepare(sent.round_index + 1, work.filter_seed)
        client = self._client(sent, work)
        methods.algorithm.begin(vectors, client)
        removed = self._loss_sum.new_zeros(())
        for step, (start, stop) in enumerate(work.bounds):
            losses: list[Tensor] = []
            draws = None if work.draws is None else work.draws[start:stop]
            batch = self._batch_of(work.order[start:stop], draws)
            methods.algorithm.gradient(vectors, partial(self._backward, batch, client, losses), client)
            self._loss_sum.add_(losses[0], alpha=stop - start)  # at y; a method may differentiate elsewhere as well
            ranges = None if work.ranges is None else work.ranges[step]
            measured = local_step(methods, vectors, self._state, sent.lr, ranges, measure=step == 0)
            removed = removed if measured is None else measured
        return self._loss_sum, removed

    def _client(self, sent: Sent, work: ClientWork) -> Client:
        algorithm, num_steps = self._methods.algorithm, len(work.bounds)
        return Client(
            ids=(work.client,),
            round_index=sent.round_index,
            seed=sent.seed,
            task_loss=self._task.output_loss,
            loss=lambda model, inputs, targets: self._task.loss(model, Batch(inputs, targets)),
            lr=sent.lr,
            num_steps=num_steps,
            effective_steps=algorithm.effective_steps(num_steps, sent.lr, self._methods.optimizer.momentum),
            class_counts=work.class_counts,
            is_new=work.state is None,
            frozen=self._frozen,
            filter=self._methods.filter,
            full_gradient=lambda out: self._full_gradient(work, out),
        )

    def _frozen_copy(self, layout: ParameterLayout, name: str) -> nn.Module:
        twin = copy.deepcopy(self._module)
        layout.bind(twin, self.vectors.anchor if name == "anchor" else self.vectors.own[name])
        return twin.requires_grad_(False).eval()

    def _backward(self, batch: Batch, client: Client, losses: list[Tensor]) -> None:
        """The gradient of one batch's loss, into `vectors.gradient`; the loss, onto `losses`."""
        loss = self._methods.algorithm.loss(self._module, *batch.pair(), client)
        gradients = torch.autograd.grad(loss, self._bound, allow_unused=True, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.vectors.gradient)
        losses.append(loss.detach())

    def _full_gradient(self, work: ClientWork, out: Tensor) -> None:
        """The filtered mean gradient of the task's loss over the client's samples, each once, not augmented.

        The model is in training mode, with dropout, if it has any: what the local steps follow has the same mean.
        """
        out.zero_()
        for index in work.samples.split(max((stop - start for start, stop in work.bounds), default=1)):
            loss = self._task.loss(self._module, self._batch_of(index, None))
            gradients = torch.autograd.grad(loss, self._bound, allow_unused=True, materialize_grads=True)
            out.add_(torch.cat([g.reshape(-1) for g in gradients]), alpha=len(index) / len(work.samples))
        self._methods.filter(out)
