"""The model on samples that nobody trains on: the global one on all of them, and on each client's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fedspec_dist.data.dataset import Examples
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.models.network import evaluating
from fedspec_dist.tasks.base import Task

# Of the clients, the share that is the worst decile.
_DECILE = 0.1


def evaluate(
    module: nn.Module,
    task: Task,
    examples: Examples,
    block_size: int,
    collectives: Collectives,
    keyed: Callable[[int], AbstractContextManager[None]] = lambda block: nullcontext(),
) -> dict[str, float]:
    """The task's metrics of the global model, shared between the ranks in blocks of a fixed size.

    The same bits at any number of ranks, since blocks are summed in order. `keyed` is for models that draw even now:
    the draws of a block, whichever rank has it.
    """
    num_blocks = -(-len(examples) // block_size)
    mine = range(collectives.rank, num_blocks, collectives.num_ranks)
    rows = -(-num_blocks // collectives.num_ranks)
    sums = torch.zeros(rows, task.num_sums, dtype=torch.float64, device=examples.inputs[0].device)
    with torch.no_grad(), evaluating(module):
        for row, block in enumerate(mine):
            with keyed(block):
                sums[row] = task.metrics(module, examples.block(block * block_size, (block + 1) * block_size))
    # [ranks, rows] -> block order is rows first: block = row * num_ranks + rank.
    gathered = collectives.all_gather(sums, "evaluation").transpose(0, 1).reshape(-1, task.num_sums)
    total = torch.zeros(task.num_sums, dtype=torch.float64)
    for block_sums in gathered[:num_blocks].cpu():
        total += block_sums
    return task.summarize(total, len(examples))


def evaluate_clients(
    module: nn.Module,
    task: Task,
    examples: Examples,
    owned: Sequence[Tensor],  # client -> positions of its samples
    show: Callable[[int], None],  # let the module be the client's own
    block_size: int,
    collectives: Collectives,
    keyed: Callable[[int], AbstractContextManager[None]],
) -> dict[int, dict[str, float]]:
    """Client -> the task's metrics on its own samples, of all clients that have such; each client on its home rank."""
    clients = [client for client, positions in enumerate(owned) if len(positions)]
    sums = torch.zeros(len(clients), task.num_sums, dtype=torch.float64)
    with torch.no_grad(), evaluating(module):
        for row, client in enumerate(clients):
            if client % collectives.num_ranks != collectives.rank:
                continue
            show(client)
            with keyed(client):
                for index in owned[client].split(block_size):
                    sums[row] += task.metrics(module, examples.batch(index)).cpu()
    # One rank has a client's sums, the others zeros, which add nothing.
    sums = collectives.all_gather(sums, "evaluation of clients").sum(dim=0)
    return {c: task.summarize(row, len(owned[c])) for c, row in zip(clients, sums, strict=True)}


def over_clients(results: Mapping[int, Mapping[str, float]], headline: tuple[str, str]) -> dict[str, float]:
    """Of each metric the mean over clients and the standard deviation; of the headline the mean of the worst tenth."""
    record: dict[str, float] = {}
    for name in next(iter(results.values()), {}):
        values = torch.tensor([result[name] for result in results.values()], dtype=torch.float64)
        record[f"client_{name}_mean"] = float(values.mean())
        record[f"client_{name}_std"] = float(values.std(correction=0))
        if name == headline[0]:
            worst = values.sort(descending=headline[1] == "min").values[: max(1, int(_DECILE * len(values)))]
            record[f"client_{name}_worst_decile"] = float(worst.mean())
    return record
