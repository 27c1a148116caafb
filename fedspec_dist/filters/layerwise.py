"""What all filters share: they replace one layer of a flat gradient at a time, and most have a ratio."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.core.parameters import Segment

from .order import Order


class LayerFilter(ABC):
    """Replaces every layer of a flat gradient by `filtered` of it; the rest stays as it is, bit for bit.

    Layers of one `form` share one call, which costs far less than one call each. Half precision is computed in float32
    and rounded back.
    """

    copies: ClassVar[int] = 5  # of the layers of one form, while it works; measured, for what `--plan` foretells

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self._starts: dict[tuple[int, ...], list[int]] = {}
        for segment in segments:
            self._starts.setdefault(self.form(segment), []).append(segment.start)
        self.select()

    def select(self) -> None:
        """Notes which layers are filtered at all; called again when that may have changed."""
        self._changed = [(math.prod(form), form, starts) for form, starts in self._starts.items() if self.changes(form)]

    def prepare(self, round_number: int, seed: int | Sequence[int]) -> None:  # noqa: B027 - most filters have nothing to prepare
        """Comes before a client's local steps; rounds count from 1 over the whole run.

        `seed`, a number below 2^63, belongs to this run, round and client, whichever rank trains it; for gradients of
        several clients, `[C, P]`, there is one for each.
        """

    def __call__(self, gradient: Tensor) -> None:
        """Filters `gradient [P]` or `[C, P]`, of any floating dtype, on its device and without waiting for it."""
        dim = gradient.dim() - 1
        for size, form, starts in self._changed:
            layers = [gradient.narrow(-1, start, size) for start in starts]
            self.replace([layer.unflatten(-1, form) for layer in layers] if len(form) > 1 else layers, dim)

    def replace(self, layers: list[Tensor], dim: int) -> None:
        """Filters `layers`, L views `[..., *form]` into the gradient, stacked along a new dimension `dim`."""
        replace_stacked(layers, self.filtered, dim)

    @abstractmethod
    def form(self, segment: Segment) -> tuple[int, ...]:
        """The shape in which `filtered` takes this layer."""

    @abstractmethod
    def changes(self, form: tuple[int, ...]) -> bool:
        """Whether layers of this form are filtered at all; if not, they keep their bits."""

    @abstractmethod
    def filtered(self, layers: Tensor) -> Tensor:
        """What takes the place of `layers [..., L, *form]`, L layers of one form; does not write to them."""


def ratio_at(schedule: Sequence[Sequence[float]], round_number: int) -> float:
    """The ratio of a round (counting from 1): linear between the `[round, ratio]` pairs and constant outside."""
    rounds, ratios = zip(*schedule, strict=True)
    return float(np.interp(round_number, rounds, ratios))


class RatioFilter(LayerFilter):
    """A filter of each layer read as a signal `[d]`, whose `ratio` says how much it takes away.

    `order` says in which order a layer's entries form the signal (`order.Order`). A `schedule` of `[round, ratio]`
    pairs takes the place of `ratio` (`ratio_at`). A new filter is prepared for round 1, with seed 0.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        ratio: float,
        order: str,
        schedule: Sequence[Sequence[float]] | None,
    ) -> None:
        self.ratio = ratio
        self._schedule = schedule
        self.permutations = Order(order).permutations(segments)
        super().__init__(segments)
        self.prepare(round_number=1, seed=0)

    def prepare(self, round_number: int, seed: int | Sequence[int]) -> None:
        if self._schedule is not None:
            self.ratio = ratio_at(self._schedule, round_number)
            self.select()

    def form(self, segment: Segment) -> tuple[int, ...]:
        return (segment.size,)

    def changes(self, form: tuple[int, ...]) -> bool:
        return self.takes_from(*form)

    def filtered(self, layers: Tensor) -> Tensor:
        d = layers.shape[-1]
        if d not in self.permutations:
            return self.signal_filtered(layers)
        permutation = self.permutations[d] = self.permutations[d].to(layers.device)
        return permutation.restore(self.signal_filtered(permutation.apply(layers)))

    @abstractmethod
    def takes_from(self, d: int) -> bool:
        """Whether anything is taken from a signal of length `d` at the current ratio."""

    @abstractmethod
    def signal_filtered(self, signals: Tensor) -> Tensor:
        """What takes the place of `signals [..., L, d]`; does not write to them."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, which FFTs on CPUs do not take; else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def replace_stacked(views: list[Tensor], function: Callable[[Tensor], Tensor], dim: int) -> None:
    """Writes `function` of the views, stacked along a new dimension `dim`, in their place."""
    stacked = torch.stack(views, dim)
    result = function(stacked.to(working_dtype(stacked.dtype)))
    torch._foreach_copy_(views, list(result.unbind(dim)))
