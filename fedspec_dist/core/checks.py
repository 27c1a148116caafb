"""Checks of what a config gave."""

from __future__ import annotations


def require(allowed: bool, key: str, what: str, given: object) -> None:
    """Raises ValueError, naming the dotted key, unless the value given for it is allowed."""
    if not allowed:
        raise ValueError(f"{key}: must be {what}, got {given!r}")
