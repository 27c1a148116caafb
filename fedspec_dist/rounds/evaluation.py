"""The global model on the test set, shared between the ranks in blocks of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.models.modes import evaluating
from fedspec_dist.tasks.classification import Classification


def evaluate(
    module: nn.Module,
    task: Classification,
    images: Tensor,
    labels: Tensor,
    block_size: int,
    collectives: Collectives,
    keyed: Callable[[int], AbstractContextManager[None]] = lambda block: nullcontext(),
) -> dict[str, float]:
    """The task's test metrics; the same bits at any number of ranks, since blocks are summed in order.

    `keyed` is for models that draw even now: the draws of a block, whichever rank has it.
    """
    num_blocks = -(-len(images) // block_size)
    mine = range(collectives.rank, num_blocks, collectives.num_ranks)
    rows = -(-num_blocks // collectives.num_ranks)
    sums = torch.zeros(rows, task.num_sums, dtype=torch.float64, device=images.device)
    with torch.no_grad(), evaluating(module):
        for row, block in enumerate(mine):
            inside = slice(block * block_size, (block + 1) * block_size)
            with keyed(block):
                sums[row] = task.metrics(module(images[inside]), labels[inside])
    # [ranks, rows] -> block order is rows first: block = row * num_ranks + rank.
    gathered = collectives.all_gather(sums, "evaluation").transpose(0, 1).reshape(-1, task.num_sums)
    total = torch.zeros(task.num_sums, dtype=torch.float64)
    for block_sums in gathered[:num_blocks].cpu():
        total += block_sums
    return task.summarize(total, len(images))
