"""What a method's constructor accepts. The config asks the same of `methods.py`, before torch is imported.

All give back the value, and raise ValueError naming `local.algorithm.<key>` where it is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from fedspec_dist.core.checks import require

Choice = TypeVar("Choice", int, str)


def not_negative(key: str, value: float) -> float:
    require(0 <= value < math.inf, f"local.algorithm.{key}", "at least 0", value)
    return value


def positive(key: str, value: float) -> float:
    require(0 < value < math.inf, f"local.algorithm.{key}", "above 0", value)
    return value


def share(key: str, value: float) -> float:
    require(0 < value <= 1, f"local.algorithm.{key}", "above 0 and at most 1", value)
    return value


def cosine(key: str, value: float) -> float:
    require(-1 <= value <= 1, f"local.algorithm.{key}", "from -1 to 1", value)
    return value


def one_of(key: str, value: Choice, choices: Sequence[Choice]) -> Choice:
    require(value in choices, f"local.algorithm.{key}", " or ".join(map(repr, choices)), value)
    return value
