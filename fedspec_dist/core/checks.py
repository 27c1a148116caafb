"""A check of what a config gave, for a method of a user's own whose line in the table cannot say it."""

from __future__ import annotations


def require(allowed: bool, key: str, what: str, given: object) -> None:
    """Raises ValueError, naming the dotted key, unless the value given for it is allowed."""
    if not allowed:
        raise ValueError(f"{key}: must be {what}, got {given!r}")
