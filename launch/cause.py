"""Why a job was stopped, and what follows from it: the signal says little, so the scheduler is asked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from launch import attempts, queue

# A time limit is enforced up to this late; a job that is ended at its limit has run so long at least, less this.
_LIMIT_SLACK_S = 30.0
_QUESTIONS, _PAUSE_S = 3, 0.5


@dataclass(frozen=True)
class Decision:
    outcome: str
    reason: str
    by_scheduler: bool = False  # which has requeued the job already


def find_cause(
    stopped_by: str | None,
    cancelled: bool,
    where: str,
    job_id: str,
    variables: Mapping[str, str],
    before_meeting: bool = False,
) -> Decision:
    """What a stop was for. SIGTERM alone says little, so the scheduler is asked what it is doing to the job.

    `before_meeting`: the signal came before the ranks could agree on anything, and maybe to this one alone.
    """
    if cancelled:
        return Decision(attempts.CANCELLED, "cancelled by launch.cancel; submit it again to go on")
    if where == "debug" or stopped_by == "SIGINT":
        return Decision(attempts.STOPPED, f"stopped by {stopped_by or 'a signal'}; submit it again to go on")
    if stopped_by in ("SIGUSR1", "SIGUSR2"):
        return Decision(attempts.REQUEUED, f"stopped by {stopped_by}, before a time limit or a preemption: requeued")
    if where == "local":
        return Decision(attempts.STOPPED, "stopped by SIGTERM; submit it again to go on")
    fields, error = _ask(job_id)
    if not fields:
        return Decision(
            attempts.STOPPED, f"stopped by {stopped_by}, and SLURM did not say why{error}; submit it again to go on"
        )
    found = cause_of_sigterm(fields, int(variables.get("SLURM_RESTART_COUNT", "0")))
    if found.outcome == attempts.CANCELLED and before_meeting and fields.get("JobState") == "RUNNING":
        return Decision(attempts.FAILED, "srun ended this rank, since another one failed at its start")
    return found


def _ask(job_id: str) -> tuple[Mapping[str, str], str]:
    """What the scheduler says of the job. A busy one may say nothing at first, and little time is left."""
    error = ""
    for _ in range(_QUESTIONS):
        try:
            if fields := queue.job_fields(job_id):
                return fields, ""
        except queue.QueueError as refusal:
            error = f" ({refusal})"
        time.sleep(_PAUSE_S)
    return {}, error


def cause_of_sigterm(fields: Mapping[str, str], restarts: int) -> Decision:
    """From `scontrol show job`: the scheduler's own requeue, the time limit, a preemption, or somebody's scancel."""
    if int(fields.get("Restarts", "0")) > restarts or fields.get("JobState") == "PENDING":
        return Decision(attempts.REQUEUED, "requeued by SLURM: a preemption, or scontrol requeue", by_scheduler=True)
    if fields.get("Reason") == "TimeLimit" or fields.get("JobState") == "TIMEOUT" or _is_at_limit(fields):
        return Decision(attempts.REQUEUED, "at the time limit, without an earlier signal: requeued")
    if fields.get("JobState") == "PREEMPTED" or fields.get("PreemptTime", "None") not in ("None", "Unknown", ""):
        return Decision(attempts.REQUEUED, "preempted: requeued")
    return Decision(attempts.CANCELLED, "cancelled by scancel; submit it again to go on")


def _is_at_limit(fields: Mapping[str, str]) -> bool:
    """A job under cancellation has the present as its end."""
    used, limit = _seconds(fields.get("RunTime", "")), _seconds(fields.get("TimeLimit", ""))
    return used is not None and limit is not None and used >= limit - _LIMIT_SLACK_S


def _seconds(text: str) -> float | None:
    """Of SLURM's [DAYS-]HH:MM:SS; None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in [*parts, days or "0"]):
        return None
    hours, minutes, seconds = map(int, parts)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
