"""Standard streams that may be closed, at the start or at any time later."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


def open_standard_streams() -> None:
    """Give a process that was started with a closed stdin, stdout or stderr one that leads nowhere.

    Otherwise the next file that it opens gets the number, and what anybody prints goes into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


class Output:
    """A stream as long as somebody reads it: a closed pipe or terminal costs the display, not the run.

    What its encoding cannot express is escaped.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with self._given_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._given_up():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is in the buffer would fail again, at the latest when Python exits.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
