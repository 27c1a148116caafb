"""The batched executor: some clients at once, whose parameters are the rows of one matrix.

Groups are of a fixed number of clients, in the order of the cohort, and a group is trained by one rank: so bits do not
depend on the number of ranks. They are not those of one client after the other, since matrix products of several
clients add in another order. Batches are padded to the longest of a step, rounded up, and clients that are done stay
where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import Client
from fedspec_dist.clients.executors.base import BatchOf, ClientReport, ClientWork, Kept, Rows, Sent, Statistics
from fedspec_dist.clients.executors.group_gradients import GroupGradients
from fedspec_dist.clients.executors.groups import PaddedSteps
from fedspec_dist.clients.step import LocalMethods, Ranges, local_step
from fedspec_dist.clients.vectors import LocalVectors, widths
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.parameters import ParameterLayout


class BatchedExecutor:
    """See `base.Executor`. The module is read, never trained: parameters are given to it.

    Not every model, task and method can be trained so: `batchable.require_batchable` says which.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        task: Any,
        methods: LocalMethods,
        batch_of: BatchOf,
        kept: Kept,
        group_size: int,
        statistics: Statistics | None = None,
    ) -> None:
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
        self._gradients = GroupGradients(module, layout, task, methods.algorithm)

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
        vectors, client = self._vectors(sent, group), self._clients(sent, group)
        loss, removed = self._steps(sent, group, vectors, client)
        update = vectors.parameters - sent.theta
        self._methods.algorithm.end(vectors, update, client)
        inside = slice(first, first + len(group))
        rows.updates[inside, : update.shape[1]] = update
        for name, values in vectors.uploads.items():
            room = rows.short[name] if name in rows.short else rows.uploads[name]
            room[inside, : values.shape[1]] = values
        seen = [update, *vectors.own.values(), *vectors.uploads.values()]
        largest = torch.stack([values.abs().amax(dim=1) for values in seen if values.numel()]).amax(dim=0)
        kept = torch.cat(list(vectors.own.values()), dim=1) if vectors.own else None
        numbers = torch.stack([loss, removed, largest], dim=1).double()
        reports = []
        for place, each in enumerate(group):
            report = ClientReport(numbers[place], None if kept is None else kept[place].clone())
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

    def _clients(self, sent: Sent, group: Sequence[ClientWork], at_once: bool = True) -> Client:
        """What the method is told of them; unless `at_once`, of the only one, as if it were trained alone."""
        algorithm, momentum = self._methods.algorithm, self._methods.optimizer.momentum
        steps = [len(each.bounds) for each in group]
        effective = [algorithm.effective_steps(each, sent.lr, momentum) for each in steps]
        new = [each.state is None for each in group]

        def column(values: Sequence[float | bool], dtype: torch.dtype) -> Any:
            return torch.tensor(values, dtype=dtype).unsqueeze(1).to(sent.theta.device) if at_once else values[0]

        return Client(
            ids=[each.client for each in group],
            round_index=sent.round_index,
            seed=sent.seed,
            task_loss=self._task.output_loss,
            loss=lambda model, inputs, targets: self._task.loss(model, Batch(inputs, targets)),
            lr=sent.lr,
            num_steps=column(steps, torch.int64),
            effective_steps=column(effective, torch.float64),
            class_counts=torch.stack([each.class_counts for each in group]) if at_once else group[0].class_counts,
            is_new=column(new, torch.bool),
            filter=self._methods.filter,
        )

    def _steps(
        self, sent: Sent, group: Sequence[ClientWork], vectors: LocalVectors, client: Client
    ) -> tuple[Tensor, Tensor]:
        """All local steps: each client's mean loss, and the share of energy that the filter removed, `[C]`."""
        methods, padded = self._methods, PaddedSteps.of(group)
        methods.filter.prepare(sent.round_index + 1, [each.filter_seed for each in group])
        methods.algorithm.begin(vectors, client)
        state = methods.optimizer.initial_state(vectors.parameters)
        removed = vectors.parameters.new_zeros(len(group))
        losses: list[Tensor] = []  # [C] each, of every step
        alone: list[Client] = []
        if self._gradients.takes_clients:
            alone = [self._clients(sent, [each], at_once=False) for each in group]
        for step, (start, stop) in enumerate(padded.bounds):
            draws = None if padded.draws is None else padded.draws[:, start:stop].flatten(0, 1)
            batch = self._batch_of(padded.order[:, start:stop].flatten(), draws).unflattened(len(group))
            found: list[Tensor] = []
            backward = partial(self._backward, vectors, batch, padded.padding[:, start:stop], alone, found)
            methods.algorithm.gradient(vectors, backward, client)
            losses.append(found[0])  # at y: a method may differentiate elsewhere as well
            ranges, active = None, None if step < padded.fewest else step < padded.num_steps
            if group[0].ranges is not None:
                ranges, active = _ranges(group, step, vectors.gradient, active)
            measured = local_step(methods, vectors, state, sent.lr, ranges, active, measure=step == 0)
            removed = removed if measured is None else measured
        # A client that is done has losses of nothing.
        sums = torch.where(padded.counts > 0, torch.stack(losses, dim=1) * padded.counts, 0.0).sum(1)
        return sums / padded.counts.sum(1), removed

    def _backward(
        self, vectors: LocalVectors, batch: Batch, padding: Tensor, alone: Sequence[Client], losses: list[Tensor]
    ) -> None:
        """Every client's gradient of its batch's mean loss; the losses, `[C]`, onto `losses`."""
        gradient, found = self._gradients(vectors.parameters, batch, padding, alone)
        vectors.gradient.copy_(gradient)
        losses.append(found)


def _ranges(
    group: Sequence[ClientWork], step: int, like: Tensor, active: Tensor | None
) -> tuple[Ranges, Tensor | None]:
    """The ranges that all train in this step; where they differ, what each client trains, as `[C, P]`."""
    each = [client.ranges[min(step, len(client.bounds) - 1)] for client in group if client.ranges is not None]
    if all(ranges == each[0] for ranges in each):
        return each[0], active
    trained = torch.zeros_like(like, dtype=torch.bool)
    for row, ranges in zip(trained, each, strict=True):
        for start, stop in [(0, like.shape[1])] if ranges is None else ranges:
            row[start:stop] = True
    return None, trained if active is None else trained & active
