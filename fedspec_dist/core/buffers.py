"""Buffers that training changes, such as the running statistics of batch norm, as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from fedspec_dist.core.batch import Batch


def moving_buffers(module: nn.Module, batch: Batch) -> tuple[str, ...]:
    """The names of the buffers that a forward pass in training changes; the module is left as it was."""
    if not any(True for _ in module.buffers()):
        return ()
    tried = deepcopy(module).train()
    before = {name: buffer.clone() for name, buffer in tried.named_buffers()}
    with torch.no_grad():
        batch.through(tried)
    return tuple(name for name, buffer in tried.named_buffers() if not _equal(before[name], buffer))


def _equal(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and bool(torch.equal(before, after) or (before.isnan() & after.isnan()).all())


class MovingBuffers:
    """Some buffers of a module. `averaged` are the floating-point ones; the others count, and are not averaged.

    Both are vectors, in the order of the names; counts are exact in them up to 2^24.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        buffers = dict(module.named_buffers())
        floating = [name for name in names if buffers[name].is_floating_point()]
        counting = [name for name in names if name not in floating]
        self._floating = [buffers[name] for name in floating]
        self._counting = [buffers[name] for name in counting]
        self._owners = [module.get_submodule(name.rpartition(".")[0]) for name in names]
        self.num_averaged = sum(buffer.numel() for buffer in self._floating)
        self.size = self.num_averaged + sum(buffer.numel() for buffer in self._counting)

    def read(self, like: Tensor) -> Tensor:
        """`[size]`: first what is averaged, then the counts; in the type of `like`."""
        parts = [buffer.reshape(-1).to(like.dtype) for buffer in (*self._floating, *self._counting)]
        return torch.cat([like.new_zeros(0), *parts])

    def write(self, values: Tensor) -> None:
        """Give the module the values `[size]`, or only those that are averaged."""
        start = 0
        for buffer in (*self._floating, *self._counting):
            if start < len(values):
                buffer.copy_(values[start : start + buffer.numel()].view(buffer.shape))
            start += buffer.numel()

    def hold(self) -> None:
        """Put the layers that own them into eval mode: they use the values that are there, and leave them alone."""
        for owner in self._owners:
            owner.training = False  # not eval(): the layers inside it may train
