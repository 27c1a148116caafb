"""Kinds of failure. An error says its own as `kind`; whoever writes a failure down asks `kind_of`.

A program that decides what follows from a failure (a sweep, a requeue) reads the kind and never the words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Kind(str, Enum):
    """What a failed run died of."""

    CONFIG = "config"  # what was typed
    LAUNCH = "launch"  # how the job was started, or the machine
    DATA = "data"  # a data set that is missing, damaged or not as the config says
    FILES = "files"  # the run folder cannot be written or is damaged
    IN_USE = "in_use"  # another process works in the run folder
    CHANGED = "changed"  # other data or sources than those that the folder's results were made with
    MEMORY = "memory"
    RANK_LOST = "rank_lost"  # another rank was killed, hangs, or cannot be reached
    DIVERGED = "diverged"  # numbers that are not finite: the same run would do the same again
    ERROR = "error"  # anything else


class Origin(str, Enum):
    """Where a run that diverged left the finite numbers."""

    CLIENT = "client"  # `runtime.on_nonfinite=skip` would go on without it
    SERVER = "server"
    RESULT = "result"  # all rounds were done, and what came out is no result


class NonFiniteError(ValueError):
    """A NaN or an infinity where the arithmetic cannot go on."""

    kind = Kind.DIVERGED
    origin = Origin.SERVER


def kind_of(error: BaseException) -> Kind:
    """The kind that the error carries, else what its class tells."""
    given = getattr(error, "kind", None)
    if isinstance(given, Kind):
        return given
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return Kind.MEMORY
    return Kind.FILES if isinstance(error, OSError) else Kind.ERROR


@contextmanager
def as_kind(kind: Kind) -> Iterator[None]:
    """What users' errors raised inside are, unless they say otherwise."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not isinstance(getattr(error, "kind", None), Kind):
            error.kind = kind  # type: ignore[union-attr]
        raise
