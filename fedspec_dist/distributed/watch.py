"""A thread beside the training that tells ranks of each other's signals and failures.

A rank that waits in a collective cannot look around, and a collective gives up only after minutes. This thread talks
through the rendezvous store instead: it spreads a stop request to all ranks within a second, and ends this process
when another rank has failed or has stopped answering, with a message that names that rank and its host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

_POLL_S = 0.5
# How long the main thread has to end by itself (gloo sees a closed connection at once) before it is ended.
_GRACE_S = 5.0
# A rank whose thread is silent for so long is dead or its host is gone.
_SILENCE_S = 20.0
_SHOW_CURSOR = b"\x1b[?25h"  # the live line hides it
# A Ctrl-C reaches a rank twice at once: from the terminal, and from torchrun which passes it on.
_SAME_PRESS_S = 2.0
# The others' threads look twice a second, so that they are done well within this.
_LAST_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


_installed: StopRequest | None = None


def last_stop() -> str | None:
    """What stopped this process's latest run, such as "SIGUSR2", also where another rank got the signal; else None.

    For who runs `main` in his own process, and wants to know more than that it returned 75.
    """
    return _installed.reason if _installed is not None else None


class StopRequest:
    """Set by SIGTERM, SIGUSR1, SIGUSR2 or Ctrl-C here, or by the watch when another rank got one.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._interrupted_at: float | None = None
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

    def uninstall(self) -> None:
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
            self.reason = reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > _SAME_PRESS_S:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        self.set(signal.Signals(number).name)


class Watch(threading.Thread):
    """Polls the store twice a second until `close`. `store` must be a connection of its own."""

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        stop: StopRequest,
        position: Callable[[], str] = str,  # the collective that this rank is in, empty outside
        lost: Callable[[str], object] = str,  # told when another rank is gone without a word of its own
    ) -> None:
        super().__init__(name="fedspec-watch", daemon=True)
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._stop_request = stop
        self._position = position
        self._lost = lost
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._beats: dict[int, tuple[int, float]] = {}
        self._announced = False

    def report_failure(self, summary: str) -> bool:
        """Tell the others; True for the first rank to report, whose message is the one to show."""
        text = json.dumps({"rank": self._rank, "host": socket.gethostname(), "summary": summary})
        try:
            with self._lock:
                first = self._store.add("failures", 1) == 1
                if first:
                    self._store.set("failure", text)
        except RuntimeError:  # the store is gone with the rank or the agent that held it
            return True
        return first

    def failure(self) -> dict[str, Any] | None:
        """What the first failing rank reported, if any has."""
        try:
            with self._lock:
                return json.loads(self._store.get("failure")) if self._store.check(["failure"]) else None
        except RuntimeError:
            return None

    def elsewhere(self) -> list[str]:
        """The other ranks that were in no collective when they last said where they are, with their hosts."""
        found = []
        try:
            with self._lock:
                for other in self._others:
                    if self._store.check([f"at/{other}"]):
                        at = json.loads(self._store.get(f"at/{other}"))
                        if not at["collective"]:
                            found.append(f"rank {other} on {at['host']}")
        except RuntimeError:
            return []
        return found

    def learn_reason(self) -> None:
        """Wait a moment for what stopped the job: the ranks agree to stop before all know why."""
        deadline = time.monotonic() + _LAST_S
        while not self._stop_request and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self, last: bool = False) -> None:
        """End the thread. `last`: after those of the others, since the store ends with this process."""
        self._closed.set()
        self.join(timeout=5)
        deadline = time.monotonic() + _LAST_S
        while last and time.monotonic() < deadline and not self._others_are_done():
            time.sleep(0.02)

    def _others_are_done(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self._store.check([f"done/{other}" for other in self._others]))
        return True

    def run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_POLL_S):
            try:
                with self._lock:
                    self._exchange_stop()
                    failed = self._store.check(["failure"])
                    silent = self._silent_rank(paused=time.monotonic() - last > _SILENCE_S / 2)
            except RuntimeError:
                self._end("lost contact with the rendezvous store: rank 0's host or its torchrun has ended", lost=True)
                return
            last = time.monotonic()
            if failed:
                failure = self.failure() or {}
                if failure.get("rank") != self._rank:
                    self._end(f"rank {failure.get('rank')} on {failure.get('host')} failed: {failure.get('summary')}")
                return
            if silent is not None:
                gone = f"rank {silent} has not answered for {_SILENCE_S:.0f} s: killed, or its host is gone"
                self._end(gone, lost=True)
                return
        try:
            with self._lock:
                self._exchange_stop()  # what came after the last look
                self._store.set(f"done/{self._rank}", "1")
        except RuntimeError:
            pass  # the others have ended already

    def _exchange_stop(self) -> None:
        self._stop_request.poll()
        if self._stop_request and not self._announced:
            self._store.set("stop", self._stop_request.reason)
            self._announced = True
        elif not self._announced and self._store.check(["stop"]):
            self._stop_request.set(self._store.get("stop").decode())
            self._announced = True

    def _silent_rank(self, paused: bool) -> int | None:
        """A rank whose counter has stood still; `paused` says that this thread itself did not run meanwhile."""
        self._store.add(f"alive/{self._rank}", 1)
        at = {"collective": self._position(), "host": socket.gethostname()}
        self._store.set(f"at/{self._rank}", json.dumps(at))
        now = time.monotonic()
        for other in self._others:
            beat = self._store.add(f"alive/{other}", 0)
            previous, since = self._beats.get(other, (-1, now))
            if beat != previous or paused:
                self._beats[other] = (beat, now)
            elif now - since > _SILENCE_S and not self._store.check([f"done/{other}"]):
                return other
        return None

    def _end(self, reason: str, lost: bool = False) -> None:
        if self._closed.wait(_GRACE_S):
            return
        if lost:
            self._lost(reason)
        log.error("%s; ending this rank", reason)
        with contextlib.suppress(OSError):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            sys.stderr.flush()
        os._exit(1)
