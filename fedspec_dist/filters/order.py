"""In which order the entries of a layer are read as a signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspec_dist.core.parameters import Segment

_STORED = "0123"


class Order:
    """`"0123"`, any permutation of it, or `"random"`.

    Digits are axes, the slowest first: a convolution's weight `[out, in, kh, kw]` of order `abcd` is
    `permute(a, b, c, d).flatten()`, so that `0123` is the order in which it is stored. A tensor of fewer axes takes
    those it has in the order that is given: `1023` is `10` for a matrix and changes nothing for a bias. Axes beyond the
    fourth stay last.

    `random` is one fixed random order of entries per layer, a function of nothing but the layer's size and its place
    among those given, hence the same for all clients and rounds.

    The orders of "SpecGradFilter: A Spectral Gradient Filtering Framework for Taming Federated Heterogeneity".
    """

    def __init__(self, order: str) -> None:
        self.order = order

    def permutations(self, segments: Sequence[Segment]) -> dict[int, Permutation]:
        """Layer size -> the permutation of all layers of that size, where any of them is not read as stored."""
        if self.order == _STORED:
            return {}
        indices: dict[int, list[Tensor]] = {}
        for place, segment in enumerate(segments):
            indices.setdefault(segment.size, []).append(self.index(segment, place))
        return {
            size: Permutation.of(torch.stack(group))
            for size, group in indices.items()
            if any(not torch.equal(index, torch.arange(size)) for index in group)
        }

    def index(self, segment: Segment, place: int) -> Tensor:
        """`[d]`: which of a layer's entries is the i-th of the signal."""
        if self.order == "random":
            return torch.randperm(segment.size, generator=torch.Generator().manual_seed(place))
        num_axes = len(segment.shape)
        axes = [int(digit) for digit in self.order if int(digit) < num_axes]
        return torch.arange(segment.size).view(segment.shape).permute([*axes, *range(4, num_axes)]).flatten()


@dataclass(frozen=True)
class Permutation:
    """Of the entries of L layers of size d: `forward` and its inverse `backward`, each `[L, d]`."""

    forward: Tensor
    backward: Tensor

    @classmethod
    def of(cls, index: Tensor) -> Permutation:
        return cls(index, index.argsort(-1))

    def to(self, device: torch.device) -> Permutation:
        return Permutation(self.forward.to(device), self.backward.to(device))

    def apply(self, layers: Tensor) -> Tensor:  # [..., L, d]
        return layers.gather(-1, self.forward.expand(layers.shape))

    def restore(self, signals: Tensor) -> Tensor:  # [..., L, d]
        return signals.gather(-1, self.backward.expand(signals.shape))
