"""`fedspec_dist.main` with a fault in one rank from round 2 on: FAULT says which, FAULTY_RANK where.

`raise`, `hang` (asleep, for ever), `kill` and `freeze` (by signals), `slow` (at work for SLOW_S, once), `aggregate`:
its aggregator is asleep for ever. With SILENT set, the backend behaves as NCCL may: whatever happens to the others, a
collective that cannot be completed neither raises nor returns.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from fedspec_dist import main
from fedspec_dist.clients.executors.base import Sent
from fedspec_dist.distributed import collectives
from fedspec_dist.processes import stop, watch
from fedspec_dist.rounds import loop
from fedspec_dist.server.aggregators.means import FedAvg


def _faulty(config: Any, runtime: Any, federation: Any, stage: Any, sent: Sent, *work: Any) -> Any:
    if sent.round_index >= 1:
        _fault(os.environ["FAULT"], sent.round_index)
    return _train_clients(config, runtime, federation, stage, sent, *work)


def _fault(kind: str, round_index: int) -> None:
    if kind == "raise":
        raise RuntimeError("the fault that was asked for")
    if kind == "hang":
        time.sleep(300)
    if kind in ("kill", "freeze"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    until = time.monotonic() + float(os.environ.get("SLOW_S", "0"))
    while kind == "slow" and round_index == 1 and time.monotonic() < until:
        sum(range(10_000))


class _Silent:
    """A collective's work that knows of no failure."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return False
        return True

    def wait(self) -> None:
        self._work.wait()


def _silenced(begin: Any) -> Any:
    def silent(*arguments: Any, **options: Any) -> Any:
        try:
            return _Silent(begin(*arguments, **options))
        except RuntimeError:
            time.sleep(300)  # as a call that waits for a communicator

    return silent


def _long_direction(self: FedAvg, cohort: Any) -> Any:
    print("the aggregator begins", flush=True)
    time.sleep(300)


_train_clients = loop.train_clients
if os.environ.get("RANK", "0") == os.environ["FAULTY_RANK"]:
    loop.train_clients = _faulty
if os.environ["FAULT"] == "aggregate":
    FedAvg.direction = _long_direction  # type: ignore[method-assign]
    stop._UNCUT_S = 2.0
if os.environ.get("SILENT"):
    watch._SILENCE_S = 4.0
    collectives._all_gather_single = _silenced(collectives._all_gather_single)
    collectives.dist.broadcast = _silenced(collectives.dist.broadcast)
    collectives.dist.all_to_all_single = _silenced(collectives.dist.all_to_all_single)

if __name__ == "__main__":
    sys.exit(main.main())
