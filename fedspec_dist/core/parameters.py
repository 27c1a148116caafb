"""A model as one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Segment:
    """Where one parameter tensor lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class ParameterLayout:
    """Names, shapes and offsets of the parameters that train, in the order of `module.named_parameters()`.

    The flat vector `theta [P]` holds exactly these, without padding; parameters that no pattern of `trainable`
    matches are frozen and stay in the module. One that has several names (tied weights) is there once, under the first
    of them. Buffers are constants. `key` names the setting in the error.

    Raises:
        ValueError: a pattern matches nothing.
    """

    def __init__(self, module: nn.Module, trainable: Sequence[str] = ("*",), key: str = "trainable") -> None:
        named = list(module.named_parameters())
        _require_matches(key, trainable, [name for name, _ in named])
        segments, start = [], 0
        for name, parameter in named:
            if matches(name, trainable):
                segments.append(Segment(name, tuple(parameter.shape), start, parameter.numel()))
                start += parameter.numel()
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.num_parameters = start

    def __len__(self) -> int:
        return self.num_parameters

    def select(self, patterns: Sequence[str], key: str = "filter.layers") -> list[Segment]:
        """The segments whose names match one of the glob patterns; `key` names the setting in the error."""
        _require_matches(key, patterns, [segment.name for segment in self.segments])
        return [segment for segment in self.segments if matches(segment.name, patterns)]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Name -> view into `vector [..., P]`, shaped `[..., *shape]`."""
        return {s.name: vector[..., s.start : s.stop].unflatten(-1, s.shape or (1,)) for s in self.segments}

    def flatten(self, module: nn.Module) -> Tensor:
        """A copy of the module's trainable parameters as one vector `[P]`."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[s.name].detach().reshape(-1) for s in self.segments])

    def bind(self, module: nn.Module, vector: Tensor) -> list[nn.Parameter]:
        """Let the module's trainable parameters be views into `vector [P]`, and freeze the others.

        Writing to the vector then changes the model, with no copy. Returns the bound parameters in order.
        """
        views = self.views(vector)
        bound = []
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in views)
            if name in views:
                parameter.data = views[name].reshape(parameter.shape)
                bound.append(parameter)
        return bound


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(key: str, patterns: Sequence[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{key}: {pattern!r} matches no parameter; there are: {', '.join(names)}")
