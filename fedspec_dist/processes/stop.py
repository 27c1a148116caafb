"""Requests to stop, from signals: between two clients, a run writes down what it has and ends."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from math import inf
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

_POLL_S = 0.5
# A Ctrl-C reaches a rank twice at once: from the terminal, and from torchrun which passes it on.
_SAME_PRESS_S = 2.0
# Who sends SIGTERM kills half a minute later (torchrun, SLURM). What cannot be cut short is ended after so long.
_UNCUT_S = 20.0
EXIT_STOPPED = 75  # what a stopped job exits with: EX_TEMPFAIL of sysexits.h, "try again"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


_installed: StopRequest | None = None


def last_stop() -> str | None:
    """What stopped this process's latest run, such as "SIGUSR2", also where another rank got the signal; else None.

    For who runs `main` in his own process, and wants to know more than that it returned 75.
    """
    return _installed.reason if _installed is not None else None


class StopRequest:
    """Set by SIGTERM, SIGUSR1, SIGUSR2 or Ctrl-C here, or by the watch when another rank got one.

    A second Ctrl-C interrupts at once. A thread reads the signals, too: the main thread may be in a long computation.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._interrupted_at: float | None = None
        self._set_at = inf
        self._uncut = ""  # what the main thread does that cannot be cut short
        self._installed = False
        # The kernel writes the signal's number here even while the main thread is inside a collective.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.reason is not None

    def install(self) -> None:
        global _installed
        _installed = self
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._installed = True
        threading.Thread(target=self._listen, name="fedspec-signals", daemon=True).start()

    def uninstall(self) -> None:
        self._installed = False
        self._writer.send(b"\0")  # for the thread to notice
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def poll(self) -> None:
        """Notice a signal whose handler has not run yet."""
        try:
            received = self._reader.recv(64)
        except BlockingIOError:
            return
        for number in received:
            if number in STOP_SIGNALS:
                self.set(signal.Signals(number).name)

    def set(self, reason: str) -> None:
        if self.reason is None:
            self._set_at = time.monotonic()
            self.reason = reason

    @contextlib.contextmanager
    def uncut(self, what: str) -> Iterator[None]:
        """Inside, the main thread heeds no request. After SIGTERM, which a kill follows, the process ends instead."""
        self._uncut = what
        try:
            yield
        finally:
            self._uncut = ""

    def _listen(self) -> None:
        while self._installed:
            select.select([self._reader], [], [], _POLL_S)
            self.poll()
            what, waited_s = self._uncut, time.monotonic() - self._set_at
            if what and self.reason == "SIGTERM" and waited_s > _UNCUT_S:
                log.error(
                    "SIGTERM came %.0f s ago, and %s still goes on: ending here, since a kill follows soon. The last "
                    "checkpoint is whole; start the same command again to go on from there",
                    waited_s,
                    what,
                )
                logging.shutdown()
                os._exit(EXIT_STOPPED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > _SAME_PRESS_S:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        self.set(signal.Signals(number).name)
