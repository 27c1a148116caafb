"""The local step, from a batch's gradient to new parameters: one function for all executors, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.optimizers import LocalOptimizer
from fedspec_dist.clients.vectors import LocalVectors

# Stretches of the vector that train in a step; None: all of it.
Ranges = Sequence[tuple[int, int]] | None


class Filter(Protocol):
    """What a local step asks of a gradient filter; see `fedspec_dist.filters`."""

    def prepare(self, round_number: int, seed: int | Sequence[int]) -> None:
        """Before a client's first step of a round; rounds count from 1. Of a batch of clients, a seed each."""

    def __call__(self, gradient: Tensor) -> None:
        """Changes `gradient [..., P]` in place."""


@dataclass(frozen=True)
class LocalMethods:
    """What happens in a local step after the backward pass, in this order."""

    filter: Filter
    algorithm: LocalAlgorithm
    optimizer: LocalOptimizer


def local_step(
    methods: LocalMethods,
    vectors: LocalVectors,
    state: Mapping[str, Tensor],
    lr: float,
    ranges: Ranges = None,
    active: Tensor | None = None,
    measure: bool = False,
) -> Tensor | None:
    """One step of `vectors.parameters [..., P]` along the batch's gradient, which is in `vectors.gradient`.

    Filter, correct, clip, weight decay, optimizer, all in place. `state` is the optimizer's. Outside `ranges` the
    gradient counts as zero, and neither weight decay nor the optimizer's memory acts. Of a batch of clients the same
    holds where `active` is False: `[C, 1]`, for those that still have work, or `[C, P]`, for ranges of each client's
    own. With `measure`, the share of the gradient's energy that the filter removes, `[...]`; else None.
    """
    gradient = vectors.gradient
    _clear_outside(gradient, ranges, active)
    removed = None
    if measure:
        removed = _filtered_and_measured(methods.filter, gradient)
    else:
        methods.filter(gradient)
    methods.algorithm.correct(vectors)
    _clear_outside(gradient, ranges, active)  # what a filter or a correction has put there
    methods.optimizer.clip(gradient)
    whole = [(0, gradient.shape[-1])] if ranges is None else ranges
    before = None if active is None else [vectors.parameters, *state.values()]
    kept = None if before is None else [tensor.clone() for tensor in before]
    for start, stop in whole:
        part = (Ellipsis, slice(start, stop))
        if stop - start == gradient.shape[-1]:
            methods.optimizer.step(vectors.parameters, gradient, state, lr)
        else:
            inside = {name: value[part] if value.shape == gradient.shape else value for name, value in state.items()}
            methods.optimizer.step(vectors.parameters[part], gradient[part], inside, lr)
    if active is not None and before is not None and kept is not None:
        for tensor, old in zip(before, kept, strict=True):
            tensor.copy_(torch.where(active, tensor, old))
    return removed


def _clear_outside(gradient: Tensor, ranges: Ranges, active: Tensor | None) -> None:
    if active is not None and active.shape == gradient.shape:
        gradient.masked_fill_(~active, 0.0)
    if ranges is None:
        return
    last = 0
    for start, stop in [*ranges, (gradient.shape[-1], gradient.shape[-1])]:
        gradient[..., last:start].zero_()
        last = stop


def _filtered_and_measured(kept: Filter, gradient: Tensor) -> Tensor:
    before = torch.linalg.vector_norm(gradient, dim=-1).square()
    kept(gradient)
    after = torch.linalg.vector_norm(gradient, dim=-1).square()
    return torch.where(before > 0, 1 - after / before, 0.0)
