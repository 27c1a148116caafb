"""A thread beside the training that tells ranks of each other's signals and failures.

A collective knows nothing of the ranks that it waits for. This thread talks through the rendezvous store instead: it
spreads a stop request to all ranks within a second, and when another rank has failed or has stopped answering, it says
so to the main thread where that waits in a collective, and else ends this process, with a message that names that rank
and its host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

from fedspec_dist.processes.environment import tell_launcher
from fedspec_dist.processes.orphans import identity, kill
from fedspec_dist.processes.stop import StopRequest

log = logging.getLogger(__name__)

_POLL_S = 0.5
# How long the main thread has to end by itself (in a collective it is told at once) before it is ended.
_GRACE_S = 5.0
# A rank whose thread is silent for so long is dead or its host is gone.
_SILENCE_S = 20.0
# The share of a processor that a main thread needs which works; one that is stuck, or looks for something that does
# not come, needs less.
_AT_WORK = 0.01
_SHOW_CURSOR = b"\x1b[?25h"  # the live line hides it
# The others' threads look twice a second, so that they are done well within this.
_LAST_S = 5.0


class Watch(threading.Thread):
    """Polls the store twice a second until `close`. `store` must be a connection of its own."""

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        stop: StopRequest,
        position: Callable[[], str] = str,  # the collective that this rank is in, empty outside
        timeout_s: float = inf,
        lost: Callable[[str], object] = str,  # told when another rank is gone without a word of its own
    ) -> None:
        super().__init__(name="fedspec-watch", daemon=True)
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._stop_request = stop
        self._position = position
        self._timeout_s = timeout_s
        self._lost = lost
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._own = {"host": socket.gethostname(), "process": identity(os.getpid())}
        self._beat = 0
        self._told: dict[int, dict[str, Any]] = {}  # what each of the others said last
        self._heard: dict[int, float] = {}  # and since when it has said nothing else
        self._last_work = -inf
        self._verdict = ""
        self._announced = False

    @property
    def knows_why(self) -> bool:
        """Whether it has said already what ends this rank."""
        return bool(self._verdict)

    def trouble(self, since: float) -> str:
        """Why the main thread should leave a collective in which it has been since then; empty: wait.

        A rank that answers and works is waited for, however long that takes. What counts against `timeout_s` is the
        time in which nobody works: all are in a collective, each perhaps in another, or stand still.
        """
        if self._verdict:
            return self._verdict
        if time.monotonic() - max(since, self._last_work) > self._timeout_s:
            return f"no other rank has done any work for {self._timeout_s:.0f} s (runtime.timeout_s)"
        return ""

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
        """The other ranks that were not where this one is when they last said where they are, with their hosts."""
        here, found = self._position(), []
        for other, told in sorted(dict(self._told).items()):
            if not told["collective"]:
                found.append(f"rank {other} on {told['host']}")
            elif told["collective"] != here:
                found.append(f"rank {other} on {told['host']} (in {told['collective']})")
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
        pause_s = 0.0  # others should know soon where this rank is
        while not self._closed.wait(pause_s):
            pause_s = _POLL_S
            try:
                with self._lock:
                    self._exchange_stop()
                    failed = self._store.check(["failure"])
                    silent = self._silent_rank(paused=time.monotonic() - last > _SILENCE_S / 2)
            except RuntimeError:
                self._verdict = "lost contact with the rendezvous store: rank 0's host or its torchrun has ended"
                kill(self._told.get(0, {}).get("process", ""), only_if_stopped=True)  # who may have held the store
                self._end(self._verdict, lost=True)
                return
            last = time.monotonic()
            if failed:
                failure = self.failure() or {}
                if failure.get("rank") != self._rank:
                    self._end(f"rank {failure.get('rank')} on {failure.get('host')} failed: {failure.get('summary')}")
                return
            if silent is not None:
                where = self._told.get(silent, {})
                host = f" on {where['host']}" if where else ""
                # Before the kill, which a collective notices at once and without a reason.
                self._verdict = (
                    f"rank {silent}{host} has not answered for {_SILENCE_S:.0f} s: killed, or its host is gone"
                )
                # Its launcher would tell it to stop, wait for an answer, and hold the job up meanwhile.
                kill(where.get("process", ""))
                self._end(self._verdict, lost=True)
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
        """A rank whose word has stayed the same; `paused` says that this thread itself did not run meanwhile."""
        self._beat += 1
        at = {"beat": self._beat, "collective": self._position(), "busy_s": _main_thread_s(), **self._own}
        self._store.set(f"at/{self._rank}", json.dumps(at))
        now = time.monotonic()
        there = [other for other in self._others if other in self._told or self._store.check([f"at/{other}"])]
        told = self._store.multi_get([f"at/{other}" for other in there]) if there else []
        for other, text in zip(there, told, strict=True):
            said, before = json.loads(text), self._told.get(other)
            self._told[other] = said
            if before is None or said["beat"] != before["beat"]:
                since, self._heard[other] = self._heard.get(other, now), now
                busy_s = said["busy_s"] - before["busy_s"] if before else 0.0
                if not said["collective"] and busy_s > _AT_WORK * (now - since):
                    self._last_work = now
        for other in self._others:
            if paused or other not in self._heard:
                self._heard[other] = now
            elif now - self._heard[other] > _SILENCE_S and not self._store.check([f"done/{other}"]):
                return other
        return None

    def _end(self, reason: str, lost: bool = False) -> None:
        self._verdict = reason
        if self._closed.wait(_GRACE_S):
            return
        if lost:
            self._lost(reason)
        log.error("%s; ending this rank", reason)
        tell_launcher(reason)
        with contextlib.suppress(OSError):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            sys.stderr.flush()
        os._exit(1)


def _main_thread_s() -> float:
    """What the main thread has used of a processor."""
    main = threading.main_thread().ident
    if main is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(main))
