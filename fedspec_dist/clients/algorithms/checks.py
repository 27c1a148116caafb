"""What a method's constructor accepts. The config asks the same of `methods.py`, before torch is imported.

All give back the value, and raise ValueError naming `local.algorithm.<key>` where it is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice", int, str)


def not_negative(key: str, value: float) -> float:
    _require(0 <= value < math.inf, key, value, "at least 0")
    return value


def positive(key: str, value: float) -> float:
    _require(0 < value < math.inf, key, value, "above 0")
    return value


def share(key: str, value: float) -> float:
    _require(0 < value <= 1, key, value, "above 0 and at most 1")
    return value


def cosine(key: str, value: float) -> float:
    _require(-1 <= value <= 1, key, value, "from -1 to 1")
    return value


def one_of(key: str, value: Choice, choices: Sequence[Choice]) -> Choice:
    _require(value in choices, key, value, " or ".join(map(repr, choices)))
    return value


def _require(fulfilled: bool, key: str, value: object, allowed: str) -> None:
    if not fulfilled:
        raise ValueError(f"local.algorithm.{key}: {value!r} given; allowed is {allowed}")
