"""The ratio of a filter as a function of the round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def ratio_at(schedule: Sequence[Sequence[float]], round_number: int) -> float:
    """The ratio of a round (counting from 1): linear between the `[round, ratio]` pairs and constant outside."""
    rounds, ratios = zip(*schedule, strict=True)
    return float(np.interp(round_number, rounds, ratios))


def check_ratio(ratio: float) -> float:
    """The ratio itself.

    Raises:
        ValueError: it is outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"filter.ratio: must be at least 0 and below 1, got {ratio}")
    return ratio


def check_schedule(schedule: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """The schedule itself.

    Raises:
        ValueError: it is not made of `[round, ratio]` pairs of increasing rounds from 1 and ratios in [0, 1).
    """
    valid = all(len(point) == 2 and float(point[0]).is_integer() and 0 <= point[1] < 1 for point in schedule)
    if not valid or not schedule or not all(a[0] < b[0] for a, b in pairwise([(0, 0), *schedule])):
        raise ValueError(
            f"filter.schedule: got {schedule}; must be [round, ratio] pairs, with increasing rounds from 1 on and "
            "ratios of at least 0 and below 1"
        )
    return schedule
