"""Checks of what a config gave, for methods of users' own whose line in the table cannot say it.

All raise ValueError, naming the dotted key. Those of a local method's parameters give the value back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice", int, str)


def require(allowed: bool, key: str, what: str, given: object) -> None:
    if not allowed:
        raise ValueError(f"{key}: must be {what}, got {given!r}")


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
