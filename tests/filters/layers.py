"""Layers of all kinds, for every filter's tests: equal sizes of unequal shapes, apart from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedspec_dist.core.parameters import Segment

SHAPES = ((40,), (3,), (61,), (5, 8), (1,), (9, 10), (3, 2, 3, 4), (1, 61), (2, 2, 5, 2), (20, 2, 1), (10,))
NUM_PARAMETERS = sum(math.prod(shape) for shape in SHAPES)
SKIPPED = {1, 5}  # layers that no filter is given


def segments() -> list[Segment]:
    result, start = [], 0
    for i, shape in enumerate(SHAPES):
        result.append(Segment(f"layer{i}", shape, start, math.prod(shape)))
        start += math.prod(shape)
    return result


def given() -> list[Segment]:
    return [segment for i, segment in enumerate(segments()) if i not in SKIPPED]


def random_gradient(*leading: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*leading, NUM_PARAMETERS, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Unlike `torch.equal`, tells -0 from 0."""
    return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
