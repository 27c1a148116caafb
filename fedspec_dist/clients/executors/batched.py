"""The batched executor: some clients at once, whose parameters are the rows of one matrix.

Groups are of a fixed number of clients, in the order of the cohort, and a group is trained by one rank: so bits do not
depend on the number of ranks. They are not those of one client after the other, since matrix products of several
clients add in another order. Batches are padded to the largest of a step, and clients that are done stay where they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.executors.base import ClientReport, ClientWork, Kept, Rows, Sent, Statistics
from fedspec_dist.clients.step import LocalMethods, local_step
from fedspec_dist.clients.vectors import LocalVectors, widths
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.tasks.base import Task


def why_not_batched(
    module: nn.Module, methods: LocalMethods, task: Any, buffers: Sequence[str], private: bool, on_features: bool
) -> str:
    """Why clients of this model cannot be trained at once, with what to do about it; empty when they can.

    `private`: they keep parts of the model; `on_features`: the local method acts on the model's features.
    """
    algorithm = methods.algorithm
    if buffers:
        return "the model's batch norm normalises over the samples of one client: choose another norm"
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in module.modules()):
        return "the model has dropout, whose draws are each client's own: set it to 0"
    if on_features or algorithm.needs_full_gradient or algorithm.frozen_at:
        return "the local method compares samples of a batch, or needs other models or gradients of a client"
    if private:
        return "clients keep parts of the model: share all of it"
    if type(task).output_loss is Task.output_loss:
        return "the task's loss is not one of outputs and targets"
    return ""


def groups(num_clients: int, size: int) -> list[list[int]]:
    """Positions in the cohort, so many at a time, in order."""
    return [list(range(start, min(start + size, num_clients))) for start in range(0, num_clients, size)]


class BatchedExecutor:
    """See `base.Executor`. The module is read, never trained: parameters are given to it."""

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        task: Any,
        methods: LocalMethods,
        batch_of: Callable[[Tensor, Tensor | None], Batch],
        kept: Kept,
        group_size: int,
        statistics: Statistics | None = None,
    ) -> None:
        self._module = module
        self._layout = layout
        self._task = task
        self._methods = methods
        self._batch_of = batch_of
        self._kept = kept
        self._group_size = group_size
        self._statistics = statistics
        methods.algorithm.bind(layout.segments)
        self._shown = layout.flatten(module)
        layout.bind(module, self._shown)
        self._sizes = [segment.size for segment in layout.segments]
        own_loss = type(methods.algorithm).loss is not LocalAlgorithm.loss
        self._plain = not own_loss and type(task).terms is not Task.terms
        self._outputs = vmap(self._output, in_dims=(0, 0))

    def show(self, theta: Tensor, buffers: Tensor | None) -> None:
        self._shown.copy_(theta)

    def train(self, sent: Sent, work: Iterable[ClientWork], rows: Rows, stop: Callable[[], bool]) -> list[ClientReport]:
        reports: list[ClientReport] = []
        remaining = iter(work)
        while not stop() and (group := list(islice(remaining, self._group_size))):
            with keyed(sent.theta.device, sent.seed, "group", sent.round_index, group[0].client):
                reports += self._train(sent, group, rows, len(reports))
        return reports

    def _train(self, sent: Sent, group: Sequence[ClientWork], rows: Rows, first: int) -> list[ClientReport]:
        self.show(sent.theta, None)
        extra: list[list[Tensor]] = [[] for _ in group]
        if self._statistics is not None:
            for place, each in enumerate(group):
                extra[place] += self._statistics.before(each, sent, rows, first + place)
        vectors = self._vectors(sent, group)
        steps = torch.tensor([len(client.bounds) for client in group], device=sent.theta.device)
        client = self._client(sent, group)
        loss, removed = self._steps(sent, group, vectors, client, steps)
        update = vectors.parameters - sent.theta
        self._methods.algorithm.end(vectors, update, client)
        inside = slice(first, first + len(group))
        rows.updates[inside, : update.shape[1]] = update
        for name, values in vectors.uploads.items():
            room = rows.short[name] if name in rows.short else rows.uploads[name]
            room[inside, : values.shape[1]] = values
        seen = [update, *vectors.own.values(), *vectors.uploads.values()]
        largest = torch.stack([values.abs().amax(dim=1) for values in seen]).amax(dim=0)
        kept = torch.cat(list(vectors.own.values()), dim=1) if vectors.own else None
        reports = []
        for place, each in enumerate(group):
            num_samples = max(sum(stop - start for start, stop in each.bounds), 1)
            state = None if kept is None else kept[place].clone()
            report = ClientReport.of(loss[place] / num_samples, removed[place], largest[place], state)
            if self._statistics is not None:
                extra[place] += self._statistics.after(each, sent, rows, first + place)
            reports.append(report.with_largest(*extra[place]) if extra[place] else report)
        return reports

    def _vectors(self, sent: Sent, group: Sequence[ClientWork]) -> LocalVectors:
        """As the clients start; every vector `[C, P]` but what all are sent."""
        algorithm = self._methods.algorithm
        parameters = sent.theta.expand(len(group), -1).clone()

        def zeros(width: int | None = None) -> Tensor:
            return torch.zeros_like(parameters) if width is None else parameters.new_zeros(len(group), width)

        own = {name: zeros() for name in algorithm.own}
        for place, client in enumerate(group):
            if client.state is not None:
                for values, vector in zip(own.values(), self._kept.unpack(client.state)[0], strict=True):
                    values[place].copy_(vector)
        received = {name: sent.vectors[name] for name in algorithm.broadcast}
        uploads = {name: zeros(width) for name, width in widths(algorithm.uploads).items()}
        return LocalVectors(parameters, zeros(), sent.theta, zeros(), zeros(), own, received, uploads)

    def _client(self, sent: Sent, group: Sequence[ClientWork]) -> Client:
        algorithm, momentum = self._methods.algorithm, self._methods.optimizer.momentum
        steps = [algorithm.effective_steps(len(client.bounds), sent.lr, momentum) for client in group]
        column = torch.tensor(steps, dtype=torch.float64, device=sent.theta.device).unsqueeze(1)
        return Client(
            task_loss=self._task.output_loss,
            loss=lambda model, inputs, targets: self._task.loss(model, Batch(inputs, targets)),
            lr=sent.lr,
            num_steps=max(len(client.bounds) for client in group),
            effective_steps=column,
            class_counts=torch.stack([client.class_counts for client in group]),
            is_new=False,
            filter=self._methods.filter,
        )

    def _steps(
        self, sent: Sent, group: Sequence[ClientWork], vectors: LocalVectors, client: Client, steps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All local steps: each client's sum of losses over samples, and the energy that the filter removed, `[C]`."""
        methods = self._methods
        methods.filter.prepare(sent.round_index + 1, [each.filter_seed for each in group])
        methods.algorithm.begin(vectors, client)
        state = methods.optimizer.initial_state(vectors.parameters)
        loss_sums, removed = vectors.parameters.new_zeros(len(group)), vectors.parameters.new_zeros(len(group))
        most = max(len(each.bounds) for each in group)
        fewest = min(len(each.bounds) for each in group)
        clients = [replace(client, class_counts=each.class_counts) for each in group]
        for step in range(most):
            batch, lengths = self._padded(group, step)
            losses: list[Tensor] = []
            methods.algorithm.gradient(
                vectors, partial(self._backward, vectors, batch, lengths, clients, losses), client
            )
            loss_sums += losses[0]
            ranges = None if group[0].ranges is None else group[0].ranges[step]
            active = None if step < fewest else step < steps
            measured = local_step(methods, vectors, state, sent.lr, ranges, active, measure=step == 0)
            removed = removed if measured is None else torch.where(steps > 0, measured, 0.0)
        return loss_sums, removed

    def _padded(self, group: Sequence[ClientWork], step: int) -> tuple[Batch, list[int]]:
        """The clients' batches of a step, `[C, B, ...]`, and how many samples of each count."""
        bounds = [each.bounds[step] if step < len(each.bounds) else (0, 0) for each in group]
        lengths = [stop - start for start, stop in bounds]
        longest = max(lengths)
        parts = []
        for each, (start, stop) in zip(group, bounds, strict=True):
            index = each.order[start:stop]
            draws = None if each.draws is None else each.draws[start:stop]
            if len(index) < longest:  # any sample will do, since it does not count
                index = torch.cat([index, each.samples[:1].expand(longest - len(index))])
                draws = None if draws is None else torch.cat([draws, draws.new_zeros(longest - len(draws), 3)])
            parts.append((index, draws))
        index = torch.cat([part for part, _ in parts])
        draws = None if parts[0][1] is None else torch.cat([part for _, part in parts if part is not None])
        batch = self._batch_of(index, draws)
        shape = (len(group), longest)
        inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
        cut = tuple(part.unflatten(0, shape) for part in inputs)
        targets = None if batch.targets is None else batch.targets.unflatten(0, shape)
        return Batch(cut if len(cut) > 1 else cut[0], targets), lengths

    def _backward(
        self,
        vectors: LocalVectors,
        batch: Batch,
        lengths: Sequence[int],
        clients: Sequence[Client],
        losses: list[Tensor],
    ) -> None:
        """Every client's gradient of its batch's loss; its sum over the samples, `[C]`, onto `losses`."""
        theta = vectors.parameters.detach().requires_grad_()
        outputs = self._outputs(theta, batch.inputs)
        if self._plain and batch.targets is not None:
            stacked = self._all_losses(outputs, batch.targets, lengths)
        else:
            stacked = torch.stack(self._each_loss(outputs, batch, lengths, clients))
        vectors.gradient.copy_(torch.autograd.grad(stacked.sum(), theta)[0])
        losses.append(stacked.detach() * torch.tensor(lengths, device=theta.device))

    def _all_losses(self, outputs: Tensor, targets: Tensor, lengths: Sequence[int]) -> Tensor:
        """The task's, of all clients in a few launches, `[C]`."""
        shape = targets.shape[:2]
        sums, counts = (part.view(shape) for part in self._task.terms(outputs.flatten(0, 1), targets.flatten(0, 1)))
        if min(lengths) < shape[1]:
            inside = (
                torch.arange(shape[1], device=targets.device) < torch.tensor(lengths, device=targets.device)[:, None]
            )
            sums, counts = torch.where(inside, sums, 0.0), torch.where(inside, counts, 0.0)
        return sums.sum(1) / counts.sum(1).clamp(min=1)

    def _each_loss(
        self, outputs: Tensor, batch: Batch, lengths: Sequence[int], clients: Sequence[Client]
    ) -> list[Tensor]:
        """The local method's, one client after the other."""
        found = []
        for place, (client, length) in enumerate(zip(clients, lengths, strict=True)):
            own = outputs[place, :length]
            targets = None if batch.targets is None else batch.targets[place, :length]
            given = [
                part[place, :length] for part in (batch.inputs if isinstance(batch.inputs, tuple) else [batch.inputs])
            ]
            inputs: Any = tuple(given) if len(given) > 1 else given[0]
            # What the method asks of the model has been worked out for all clients at once.
            model = _Known(own)
            loss = self._methods.algorithm.loss(model, inputs, targets, client) if length else own.sum()  # type: ignore
            found.append(loss)
        return found

    def _output(self, theta: Tensor, inputs: Any) -> Tensor:
        """Of one client's model, `theta [P]`."""
        parts = theta.split(self._sizes)
        shaped = {s.name: part.view(s.shape) for s, part in zip(self._layout.segments, parts, strict=True)}
        outputs: Tensor = self._task.outputs(lambda *given: functional_call(self._module, shaped, given), Batch(inputs))
        return outputs


class _Known:
    """A model that has been applied already."""

    def __init__(self, outputs: Tensor) -> None:
        self._outputs = outputs

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._outputs
