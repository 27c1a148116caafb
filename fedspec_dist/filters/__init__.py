"""Gradient filters: linear operators that change a client's gradient before its local step.

A filter is built from the layers it acts on, `Filter(segments, **parameters)`, and called with the flat gradient
`[..., P]`, which it changes in place. Nothing here knows a model, a device or a rank; only `torch` and
`fedspec_dist.parameters` are imported.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedspec_dist.filters.identity import Identity
from fedspec_dist.filters.spectral import HighPass

Filter = Callable[[Tensor], None]

FILTERS: dict[str, Callable[..., Filter]] = {"none": Identity, "rfft": HighPass}
