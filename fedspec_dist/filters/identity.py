"""No filter, with the interface of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from fedspec_dist.core.parameters import Segment


class Identity:
    """Leaves every gradient as it is, bit for bit."""

    copies: ClassVar[int] = 0

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments = tuple(segments)

    def prepare(self, round_number: int, seed: int | Sequence[int]) -> None:
        """Does nothing: every round is alike."""

    def __call__(self, gradient: Tensor) -> None:
        """Does nothing to `gradient [..., P]`."""
