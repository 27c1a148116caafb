"""What the commands of this folder share: how they are called, and that they end quietly when nobody reads on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

# What a shell shows of a program that SIGPIPE ends, as `head` does to what it reads from.
EXIT_UNREAD = 128 + signal.SIGPIPE


def command(name: str) -> str:
    """How to call another command, for a hint: in the way in which this one was called."""
    return f"fedspec {name}" if Path(sys.argv[0]).name == "fedspec" else f"python -m launch.{name}"


def as_command(main: Callable[[], int]) -> int:
    """Its exit code. A closed pipe (`... | head`) is no error of the files that the command works with."""
    if sys.stdout is None:  # closed before the start
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        give_up_stdout()
        return EXIT_UNREAD
    return code


def give_up_stdout() -> None:
    """What is still in its buffer would fail again, at the latest when Python exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
