"""A model as one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


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
    """Names, shapes and offsets of the parameters that train: first the shared ones, which are aggregated, then those
    of a client's own; each part in the order of `module.named_parameters()`.

    The flat vector `theta [P]` holds exactly these, without padding; parameters that no pattern of `trainable` matches
    are frozen and stay in the module. One that has several names (tied weights) is there once, under the first of them.
    Buffers are not part of it. `prefix` is that of the keys `trainable` and `server.shared` in errors.

    Raises:
        ValueError: a pattern matches nothing, or nothing that trains is shared.
    """

    def __init__(
        self, module: nn.Module, trainable: Sequence[str] = ("*",), shared: Sequence[str] = ("*",), prefix: str = ""
    ) -> None:
        named = list(module.named_parameters())
        _require_matches(f"{prefix}trainable", trainable, [name for name, _ in named])
        training = [(name, parameter) for name, parameter in named if matches(name, trainable)]
        _require_matches(f"{prefix}server.shared", shared, [name for name, _ in training], "parameter that trains")
        training.sort(key=lambda pair: not matches(pair[0], shared))  # stable
        segments, start = [], 0
        for name, parameter in training:
            segments.append(Segment(name, tuple(parameter.shape), start, parameter.numel()))
            start += parameter.numel()
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.num_parameters = start
        self.num_shared = sum(segment.size for segment in segments if matches(segment.name, shared))

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> ParameterLayout:
        """Of segments that follow each other from 0."""
        layout = cls.__new__(cls)
        layout.segments = tuple(segments)
        layout.num_parameters = layout.num_shared = sum(segment.size for segment in segments)
        return layout

    @property
    def shared(self) -> ParameterLayout:
        """That of the shared parameters alone: the first `num_shared` entries."""
        if self.num_shared == self.num_parameters:
            return self
        return ParameterLayout.of([segment for segment in self.segments if segment.stop <= self.num_shared])

    def __len__(self) -> int:
        return self.num_parameters

    def select(self, patterns: Sequence[str], key: str = "filter.layers") -> list[Segment]:
        """The segments whose names match one of the glob patterns; `key` names the setting in the error.

        Raises:
            ValueError: a pattern matches none.
        """
        _require_matches(key, patterns, [segment.name for segment in self.segments])
        return [segment for segment in self.segments if matches(segment.name, patterns)]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Name -> view into `vector [..., P]`, shaped `[..., *shape]`."""
        return {s.name: vector[..., s.start : s.stop].unflatten(-1, s.shape or (1,)) for s in self.segments}

    def flatten(self, module: nn.Module) -> Tensor:
        """A copy of the module's trainable parameters as one vector `[P]`."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[s.name].detach().reshape(-1) for s in self.segments])

    def ranges(self, patterns: Sequence[str], key: str) -> list[tuple[int, int]]:
        """Start and stop of the stretches of the vector that the patterns match, as few as can be."""
        return joined([(segment.start, segment.stop) for segment in self.select(patterns, key)])

    def bind(self, module: nn.Module, vector: Tensor) -> list[nn.Parameter]:
        """Let the module's trainable parameters be views into `vector [P]`, and freeze the others.

        Writing to the vector then changes the model, with no copy. Returns the bound parameters in the vector's order.
        """
        views = self.views(vector)
        bound = {}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in views)
            if name in views:
                parameter.data = views[name].reshape(parameter.shape)
                bound[name] = parameter
        return [bound[segment.name] for segment in self.segments]


def with_parameters(module: nn.Module, layout: ParameterLayout, theta: Tensor, prefix: str = "") -> Callable[..., Any]:
    """The module with its parameters taken from `theta [P]`, and differentiable in these only; the others are its own.

    `prefix` is that of the layout's names in the module.
    """
    # One split, not a slice for each layer: the backward of a slice fills a whole [P] with zeros.
    parts = theta.split([segment.size for segment in layout.segments])
    shaped = {f"{prefix}{s.name}": part.reshape(s.shape) for s, part in zip(layout.segments, parts, strict=True)}
    # Those that train and are no part of theta, as where clients keep some of their own.
    others = {n: p.detach() for n, p in module.named_parameters() if n not in shaped and p.requires_grad}
    return lambda *inputs: functional_call(module, shaped | others, inputs)


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges with those that follow on each other in one."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(key: str, patterns: Sequence[str], names: list[str], what: str = "parameter") -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{key}: {pattern!r} matches no {what}; there are: {', '.join(names)}")
