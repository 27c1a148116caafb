"""A data set as training reads it: tensors, normalised, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedspec_dist.core.batch import Batch


@dataclass(frozen=True)
class Examples:
    """Samples `0 .. n - 1`; see `raw.Split`. Groups and clients are for partitions and counts, and stay on the CPU."""

    inputs: tuple[Tensor, ...]
    targets: Tensor | None = None
    groups: Tensor | None = None
    clients: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs, *([] if self.targets is None else [self.targets])))

    def batch(self, index: Tensor) -> Batch:
        """The samples at positions `index [B]`, int64, on the same device; images are then contiguous in memory."""
        return self._batch(lambda tensor: tensor.index_select(0, index))

    def block(self, start: int, stop: int) -> Batch:
        """The samples from `start` to before `stop`, without a copy."""
        return self._batch(lambda tensor: tensor[start:stop])

    def select(self, index: Tensor) -> Examples:
        """Those at positions `index [B]`, with their groups and clients."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, index.to(tensor.device))

        inputs = tuple(_take(tensor, index.to(tensor.device)) for tensor in self.inputs)
        return Examples(inputs, part(self.targets), part(self.groups), part(self.clients))

    def _batch(self, take: Callable[[Tensor], Tensor]) -> Batch:
        inputs = tuple(take(tensor) for tensor in self.inputs)
        targets = None if self.targets is None else take(self.targets)
        return Batch(inputs if len(inputs) > 1 else inputs[0], targets)


@dataclass(frozen=True)
class Dataset:
    """Both splits, and what the samples alone do not say; see `raw.RawData`.

    Images are the one input, float32 `[n, C, H, W]`, on the CPU a view of memory in the order n, H, W, C.
    """

    train: Examples
    test: Examples
    num_outputs: int
    num_groups: int = 0
    vocabulary: int | None = None
    are_images: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)  # means, names, words: who has new samples needs them

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of the first input of a sample; of images channels, height, width."""
        return tuple(self.train.inputs[0].shape[1:])

    def to(self, device: torch.device | str, image_format: torch.memory_format = torch.channels_last) -> Dataset:
        """The same on a device, images in memory as asked; no copy where it already is so."""

        def moved(examples: Examples) -> Examples:
            inputs = tuple(
                images_to(tensor, device, image_format) if self.are_images else tensor.to(device)
                for tensor in examples.inputs
            )
            targets = None if examples.targets is None else examples.targets.to(device)
            return replace(examples, inputs=inputs, targets=targets)

        return replace(self, train=moved(self.train), test=moved(self.test))

    def astype(self, dtype: torch.dtype) -> Dataset:
        """The same with its floating-point inputs and targets in another precision."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        def converted(examples: Examples) -> Examples:
            targets = None if examples.targets is None else cast(examples.targets)
            return replace(examples, inputs=tuple(cast(tensor) for tensor in examples.inputs), targets=targets)

        return replace(self, train=converted(self.train), test=converted(self.test))


def images_to(images: Tensor, device: torch.device | str, image_format: torch.memory_format) -> Tensor:
    """`[n, C, H, W]` of a data set on a device, in memory as asked there; no copy where both already are so."""
    base = images.permute(0, 2, 3, 1)
    return base.to(device).permute(0, 3, 1, 2).contiguous(memory_format=image_format)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """`tensor[index]`; images stay in memory in the order n, H, W, C."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return tensor.index_select(0, index)
