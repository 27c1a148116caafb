"""Whether clients can be trained at once: asked of model, task and local method before the first round, and tried."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fedspec_dist.clients.executors.base import ClientWork, Kept, Rows, Sent
from fedspec_dist.clients.executors.batched import BatchedExecutor
from fedspec_dist.clients.executors.group_gradients import GroupGradients, cannot
from fedspec_dist.clients.step import LocalMethods
from fedspec_dist.clients.vectors import widths
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.tasks.base import Task

_LR = 1e-3  # of the trial; that it goes nowhere far is enough


def require_batchable(
    module: nn.Module,
    layout: ParameterLayout,
    task: Any,
    methods: LocalMethods,
    batch: Batch,
    moving: Sequence[str],
    num_groups: int,
    on_features: bool,
) -> None:
    """On a copy of the model two clients of one sample each make a step, with methods that nobody else uses.

    Args:
        batch: two samples
        moving: names of the model's buffers that training moves
        num_groups: of the data set
        on_features: the local method acts on the model's features

    Raises:
        ValueError: naming `runtime.executor`, and why not.
    """
    algorithm = methods.algorithm
    if moving:
        raise cannot(
            f"training changes the model's buffers ({', '.join(sorted(moving)[:3])}), as batch norm's do from the "
            "samples of one client: choose another norm"
        )
    if on_features:
        raise cannot("the local method acts on the model's features, not on its outputs")
    if algorithm.needs_full_gradient:
        raise cannot("the local method asks for the gradient over all samples of a client")
    if algorithm.frozen_at:
        raise cannot("the local method asks for the model at other parameters, too")
    if layout.num_shared < len(layout):
        raise cannot("clients keep parts of the model: share all of it")
    if type(task).output_loss is Task.output_loss:
        raise cannot("the task's loss is not one of outputs and targets")
    copied = deepcopy(module)
    if why := GroupGradients(copied, layout, task, algorithm).why_not(layout.flatten(copied), batch):
        raise cannot(why)
    _step(copied, layout, task, methods, batch, num_groups)


def _step(
    module: nn.Module, layout: ParameterLayout, task: Any, methods: LocalMethods, batch: Batch, num_groups: int
) -> None:
    """Whatever a method asks for that two clients at once do not have, it asks for here."""
    theta, algorithm = layout.flatten(module), methods.algorithm
    places = torch.arange(2, device=theta.device)
    counts = torch.ones(num_groups, dtype=torch.int64, device=theta.device)
    zeros = theta.new_zeros(2, len(theta))
    sizes = widths(algorithm.uploads)
    rows = Rows(
        zeros.clone(),
        {name: zeros.clone() for name, width in sizes.items() if width is None},
        {name: theta.new_zeros(2, width, dtype=torch.float64) for name, width in sizes.items() if width is not None},
    )

    def batch_of(index: Tensor, draws: Tensor | None) -> Batch:
        targets = None if batch.targets is None else batch.targets[index]
        if isinstance(batch.inputs, tuple):
            return Batch(tuple(part[index] for part in batch.inputs), targets)
        return Batch(batch.inputs[index], targets)

    work = [ClientWork(n, places[n : n + 1], places[n : n + 1], [(0, 1)], None, counts, n) for n in range(2)]
    sent = Sent(theta, _LR, 0, 0, {name: torch.zeros_like(theta) for name in algorithm.broadcast})
    kept = Kept(len(algorithm.own), len(theta))
    BatchedExecutor(module, layout, task, methods, batch_of, kept, 2).train(sent, work, rows, lambda: False)
