"""For a run that does not stop in time: a thread beside it that puts the job back into the queue before it is killed.

A run stops between two clients. One whose clients take longer than the time between the signal and the kill would be
killed in the middle, by a scheduler that does not start it again. Nothing is lost by going on from the last checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL_S = 0.5
# SIGTERM comes KillWait before SIGKILL, 30 s by default and sometimes much less.
_AFTER_SIGTERM_S = 3.0
# What a requeue takes, and what the clock of a busy scheduler may be off.
_MARGIN_S = 20.0
_SHORTEST_S = 5.0


def patience(signal_name: str, signal_before_s: float) -> float:
    """How long after a signal the run may still stop by itself."""
    return _AFTER_SIGTERM_S if signal_name == "SIGTERM" else max(_SHORTEST_S, signal_before_s - _MARGIN_S)


class Overdue(threading.Thread):
    """Calls `act` with the signal's name once the run has not stopped for too long; `noticed` tells that name.

    `act` returns whether it has accounted for the end of the attempt.
    """

    def __init__(
        self, noticed: Callable[[], str | None], act: Callable[[str], bool], patience_s: Callable[[str], float]
    ) -> None:
        super().__init__(name="launch-overdue", daemon=True)
        self._noticed = noticed
        self._act = act
        self._patience_s = patience_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.has_acted = False

    def run(self) -> None:
        since = None
        while not self._stopped.wait(_POLL_S):
            name = self._noticed()
            if name is None:
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= self._patience_s(name):
                with self._lock:
                    if not self._stopped.is_set():
                        self.has_acted = self._act(name)
                return

    def stop(self) -> bool:
        """The run has ended; True when that was too late. Waits for what is under way."""
        self._stopped.set()
        with self._lock:
            return self.has_acted
