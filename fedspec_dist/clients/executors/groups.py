"""Which clients the batched executor trains at once, and how their batches are padded: planning, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fedspec_dist.clients.executors.base import ClientWork


def groups(num_clients: int, size: int) -> list[list[int]]:
    """Positions in the cohort, so many at a time, in order."""
    return [list(range(start, min(start + size, num_clients))) for start in range(0, num_clients, size)]


@dataclass(frozen=True)
class PaddedSteps:
    """The batches of C clients, step by step, each padded to the longest of its step, rounded up to a power of two.

    There are few shapes so: for each, the operations of a step are found out once. Padding repeats the client's first
    sample, which keeps it within what the client may see.
    """

    order: Tensor  # [C, all steps' samples] int64, positions in the training set, on the device
    draws: Tensor | None  # [C, all steps' samples, 3], of the augmentation
    bounds: Sequence[tuple[int, int]]  # of each step, within `order`
    padding: Tensor  # [C, all steps' samples] bool, on the device
    counts: Tensor  # [C, steps] int64, how many samples of a batch are no padding, on the device
    num_steps: Tensor  # [C, 1] int64, after which a client has no work left, on the device
    fewest: int  # steps that all clients make

    @classmethod
    def of(cls, group: Sequence[ClientWork]) -> PaddedSteps:
        lengths = [[stop - start for start, stop in each.bounds] for each in group]
        steps = [len(each) for each in lengths]
        counts = [each + [0] * (max(steps) - len(each)) for each in lengths]
        longest = [max(column) for column in zip(*counts, strict=True)]
        longest = [min(1 << (length - 1).bit_length(), max(longest)) for length in longest]
        device = group[0].order.device
        stops = list(accumulate(longest))
        table = torch.tensor(counts)
        padding = [torch.arange(length) >= table[:, step : step + 1] for step, length in enumerate(longest)]
        draws = [
            _padded(each.draws, each, longest, torch.zeros_like(each.draws[:1]))
            for each in group
            if each.draws is not None
        ]
        return cls(
            order=torch.stack([_padded(each.order, each, longest, each.samples[:1]) for each in group]),
            draws=torch.stack(draws) if draws else None,
            bounds=list(zip([0, *stops], stops, strict=False)),
            padding=torch.cat(padding, dim=1).to(device),
            counts=table.to(device),
            num_steps=torch.tensor(steps).unsqueeze(1).to(device),
            fewest=min(steps),
        )


def _padded(values: Tensor, work: ClientWork, longest: Sequence[int], filler: Tensor) -> Tensor:
    """A client's batches one after the other, with `filler [1, ...]` behind each that is shorter than the longest."""
    parts = []
    for step, length in enumerate(longest):
        start, stop = work.bounds[step] if step < len(work.bounds) else (0, 0)
        parts.append(values[start:stop])
        if stop - start < length:
            parts.append(filler.expand(length - (stop - start), *filler.shape[1:]))
    return torch.cat(parts)
