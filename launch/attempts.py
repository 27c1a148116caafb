"""How often a job was started, what each attempt came to, and whether another one may follow.

`attempts.jsonl` has a line for each start, by rank 0, and one for each end, by rank 0 or, where that was killed, by the
batch script. An attempt without an end was killed with everything around it: by the scheduler, or with its node.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedspec_dist.runs.safe_files import append_line, read_objects

FINISHED = "finished"
REQUEUED = "requeued"  # after a signal, by us or by the scheduler
CANCELLED = "cancelled"
STOPPED = "stopped"  # by a signal that asks for no further attempt
GAVE_UP = "gave up"
DIVERGED = "diverged"  # it would again
FAILED = "failed"
RETRIED = "failed, retried"
# After these the job has been seen to; the batch script adds nothing.
SETTLED = (FINISHED, REQUEUED, CANCELLED, STOPPED, GAVE_UP, DIVERGED)


@dataclass(frozen=True)
class Attempt:
    """Rounds are those of the newest checkpoint; `end_round` of a killed attempt is where the next one began.

    Times are in seconds since 1970.
    """

    job_id: str
    number: int  # from 1, within the job
    start_round: int
    started: float
    restart: int = 0  # of the job as the launcher counts, see `restart_of`
    host: str = ""
    end_round: int | None = None
    ended: float | None = None
    outcome: str | None = None
    reason: str = ""

    @property
    def was_interrupted(self) -> bool:
        """Ended from outside, by a signal, a kill or a node's death."""
        return self.outcome in (None, REQUEUED)

    @property
    def made_progress(self) -> bool:
        return self.end_round is not None and self.end_round > self.start_round


def read(path: Path, job_id: str) -> list[Attempt]:
    """The attempts of one job, in order; broken lines (a full disk, a kill) are left out."""
    found: list[Attempt] = []
    for event in read_objects(path):
        try:
            if event["job_id"] != job_id:
                continue
            at, saved = float(event["time"]), int(event["round"])
            if event["event"] == "start":
                if found:  # it may have been killed, or have saved one more round after its account
                    found[-1] = replace(found[-1], end_round=max(found[-1].end_round or 0, saved))
                restart, host = int(event.get("restart", 0)), str(event.get("host", ""))
                found.append(Attempt(job_id, len(found) + 1, saved, at, restart, host))
            elif found:
                outcome, reason = str(event["outcome"]), str(event.get("reason", ""))
                found[-1] = replace(found[-1], end_round=saved, ended=at, outcome=outcome, reason=reason)
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return found


def last_start(path: Path, job_id: str) -> float:
    """In seconds since 1970, 0 for a job that never came so far."""
    found = read(path, job_id)
    return found[-1].started if found else 0.0


# `--cluster local` counts here what SLURM counts in SLURM_RESTART_COUNT.
LOCAL_RESTARTS = "FEDSPEC_DIST_LOCAL_RESTARTS"


def restart_of(variables: Mapping[str, str]) -> int:
    """How often the job was started before, from the environment of its tasks and of its batch script."""
    return int(variables.get("SLURM_RESTART_COUNT" if "SLURM_JOB_ID" in variables else LOCAL_RESTARTS, "0"))


def add_start(path: Path, job_id: str, saved_round: int, host: str, restart: int) -> None:
    _append(path, {"event": "start", "job_id": job_id, "round": saved_round, "host": host, "restart": restart})


def add_end(path: Path, job_id: str, saved_round: int, outcome: str, reason: str) -> None:
    _append(path, {"event": "end", "job_id": job_id, "round": saved_round, "outcome": outcome, "reason": reason})


def _append(path: Path, event: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps({**event, "time": time.time()}), sync=True)


# What starting, stopping and a busy scheduler may take of the time of a job.
_SLACK_S = 60.0


def stuck(attempts: Sequence[Attempt]) -> str:
    """That the last two attempts that ended from outside got nowhere, and what to do; empty when they did."""
    last = [attempt for attempt in attempts if attempt.was_interrupted][-2:]
    if len(last) < 2 or attempts[-1] is not last[-1] or any(attempt.made_progress for attempt in last):
        return ""
    return (
        f"attempts {last[0].number} and {last[1].number} were both ended before one more round was saved (both at "
        f"round {last[1].start_round}): give more time (--time), checkpoint more often (checkpoint.every), or make "
        "rounds smaller (clients_per_round, local.epochs)"
    )


def reason_to_give_up(attempts: Sequence[Attempt], max_requeues: int, seconds: float) -> str:
    """Why these attempts, the last of them ended, must not be followed by another; empty when they may.

    Only attempts that ended from outside count: failures are counted by `requeue_on_failure`. `seconds` are what an
    attempt has until it is told of its time limit. Two that got nowhere in all of them end the job at once; where a
    preemption came first, the next attempt may be luckier.
    """
    interrupted = [attempt for attempt in attempts if attempt.was_interrupted]
    had_its_time = [a.ended is not None and a.ended - a.started > seconds - _SLACK_S for a in interrupted[-2:]]
    said = stuck(attempts)
    if said and all(had_its_time):
        return f"{said}. Both had all of their time, so a further one would do no better"
    if len(interrupted) > max_requeues:
        return (
            f"the job was ended from outside {len(interrupted)} times, and cluster.max_requeues is {max_requeues}. "
            "Submit it again to go on from the last checkpoint, with a longer --time or a larger cluster.max_requeues"
            + (f"; {said}" if said else "")
        )
    return ""


def with_end(attempts: Sequence[Attempt], end_round: int, outcome: str) -> list[Attempt]:
    """As they would be if the last one ended so, now."""
    if not attempts:
        return []
    return [*attempts[:-1], replace(attempts[-1], end_round=end_round, ended=time.time(), outcome=outcome)]
