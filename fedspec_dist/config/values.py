"""Values that have a form of their own: amounts of work, shares of the clients, times and paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedspec_dist.config.files import ConfigError, shown
from fedspec_dist.config.method import MAX_AMOUNT, MAX_COUNT
from fedspec_dist.config.section import Section


class Range(Section):
    """A whole number drawn uniformly for each client and round, both ends included."""

    min: Annotated[int, Field(ge=1, le=MAX_AMOUNT)]
    max: Annotated[int, Field(ge=1, le=MAX_AMOUNT)]

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min > self.max:
            raise ValueError("min must not be above max")
        return self


def _amount(value: Any) -> Any:
    if isinstance(value, dict):
        return Range.model_validate(value)
    if type(value) is not int or not 1 <= value <= MAX_AMOUNT:
        raise ValueError(f"must be a whole number from 1 to {MAX_AMOUNT}, or {{min: ..., max: ...}}")
    return value


Amount = Annotated[int | Range, BeforeValidator(_amount)]


def _participation(value: Any) -> Any:
    """A whole number is a count, any other number a share: 1 is one client, 1.0 all of them."""
    if type(value) is int and 1 <= value <= MAX_COUNT:
        return value
    if type(value) is float and 0 < value <= 1:
        return value
    raise ValueError(
        "a count is a whole number from 1, such as 5; a share of all clients is above 0 and at most 1, such as 0.1, or "
        "1.0 for all"
    )


Participation = Annotated[int | float, BeforeValidator(_participation)]

_MAX_MINUTES = 10 * 366 * 24 * 60


def minutes(text: str) -> int:
    """A time as `90m`, `4h`, `1d12h` or `HH:MM:SS`, in whole minutes, rounded up.

    Raises:
        ValueError: anything else, or no time at all.
    """
    if clock := re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d):(\d\d)", text):
        days, hours, mins, seconds = (int(part or 0) for part in clock.groups())
    elif units := re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?", text):
        days, hours, mins, seconds = *(int(part or 0) for part in units.groups()), 0
    else:
        raise ValueError("must be a time such as 90m, 4h, 1d12h or 04:00:00")
    total = (days * 24 + hours) * 60 + mins + (seconds > 0)
    if not 0 < total <= _MAX_MINUTES:
        raise ValueError("must be a time of at least a minute, and at most ten years")
    return total


def _time(text: str) -> str:
    minutes(text)
    return text


Time = Annotated[str, AfterValidator(_time)]


def _path(text: str) -> str:
    """What no file system takes is told here, once, and not by whoever is the first to open it."""
    if len(text.encode()) > 2000 or any(len(part.encode()) > 200 for part in text.split("/")):
        raise ValueError("must be a path of at most 2000 bytes, with names of at most 200")
    return text


PathText = Annotated[str, AfterValidator(_path)]


def expand_home(key: str, path: str) -> Path:
    """The path with a leading `~` or `~user` replaced.

    Raises:
        ConfigError: there is no such home directory; `key` names the setting.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key}: got {shown(path)}, but no such home directory is known; give a whole path, or set HOME"
        ) from None
