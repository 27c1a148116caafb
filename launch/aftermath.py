"""The batch script's last word: `python -m launch.aftermath CODE ENDED FOLDER`, with the exit code of srun.

A failure that no task could account for (a killed process, a lost node, os._exit) is put into attempts.jsonl with a
readable reason, and the job goes back into the queue while `cluster.requeue_on_failure` allows it. ENDED is 1 when the
scheduler was ending the job anyway.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedspec_dist.runs.events import DIVERGED
from fedspec_dist.runs.safe_files import read_text
from launch import attempts, queue
from launch.logs import last_error, srun_errors
from launch.record import SubmissionFolder, run_of


def main(arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
    variables = os.environ if variables is None else variables
    code, ended, folder = int(arguments[0]), arguments[1] == "1", Path(arguments[2])
    array, place = variables.get("SLURM_ARRAY_JOB_ID"), int(variables.get("SLURM_ARRAY_TASK_ID", "0"))
    job_id = f"{array}_{place}" if array else variables["SLURM_JOB_ID"]
    files, restart = SubmissionFolder(run_of(folder, place)), attempts.restart_of(variables)
    text, again = settle(files, folder, job_id, code, ended, restart)
    if text:
        print(f"launch: {text}", file=sys.stderr, flush=True)
    if again:
        try:
            queue.requeue(job_id)
        except queue.QueueError as error:
            refused = f"SLURM did not requeue the job: {error}; submit it again to go on"
            print(f"launch: {refused}", file=sys.stderr, flush=True)
            attempts.add_end(files.attempts, job_id, files.rounds_saved(), attempts.FAILED, f"{text}. {refused}")
            return 1
    return 0


def settle(
    files: SubmissionFolder, folder: Path, job_id: str, code: int, ended: bool, restart: int
) -> tuple[str, bool]:
    """What to say, and whether to start the job again; writes the attempt's end where nobody did."""
    try:
        return _settle(files, folder, job_id, code, ended, restart)
    except OSError as error:
        return (
            f"the job failed with exit code {code}{_signal_of(code)}, and no account of it can be written: {error}",
            False,
        )


def _settle(
    files: SubmissionFolder, folder: Path, job_id: str, code: int, ended: bool, restart: int
) -> tuple[str, bool]:
    if ended or code == 0 or files.is_cancelled(job_id):
        return "", False
    history = attempts.read(files.attempts, job_id)
    if not history or history[-1].restart != restart:  # this time rank 0 did not come so far as to say that it starts
        attempts.add_start(files.attempts, job_id, files.rounds_saved(), socket.gethostname(), restart)
        history = attempts.read(files.attempts, job_id)
    if history[-1].outcome in attempts.SETTLED:
        return "", False
    if abs(code) - 128 * (code > 0) in (signal.SIGUSR1, signal.SIGUSR2):
        return _after_early_signal(files, job_id, history)
    end = files.last_end(history[-1].started)
    if end is not None and end.name == DIVERGED:
        attempts.add_end(files.attempts, job_id, files.rounds_saved(), attempts.DIVERGED, end.message)
        return f"the run diverged: {end.message}. Not started again: it would diverge again", False
    settings = allowed(files, "requeue_on_failure")
    failures = sum(attempt.outcome in (attempts.FAILED, attempts.RETRIED) for attempt in history) + 1
    reason = explain(files, folder, job_id, code, history[-1].started)
    again = failures <= settings
    outcome = attempts.RETRIED if again else attempts.FAILED
    attempts.add_end(files.attempts, job_id, files.rounds_saved(), outcome, reason)
    if again:
        return f"{reason}. Starting again from the last checkpoint ({failures} of {settings} further attempts)", True
    hint = "" if settings else "; cluster.requeue_on_failure=N would start it again"
    return f"{reason}. Not started again{hint}", False


def _after_early_signal(files: SubmissionFolder, job_id: str, history: Sequence[attempts.Attempt]) -> tuple[str, bool]:
    """The signal before a preemption or a time limit came while Python started, and ended what did not know it yet."""
    ended = attempts.with_end(history, files.rounds_saved(), attempts.REQUEUED)
    give_up = attempts.reason_to_give_up(ended, allowed(files, "max_requeues"), math.inf)
    reason = give_up or "stopped by a signal before the run could take it: requeued"
    outcome = attempts.GAVE_UP if give_up else attempts.REQUEUED
    attempts.add_end(files.attempts, job_id, files.rounds_saved(), outcome, reason)
    return reason, not give_up


def allowed(files: SubmissionFolder, key: str) -> int:
    """A number of `cluster` in the config of the run; 0 where it cannot be read."""
    import yaml

    try:
        config = yaml.safe_load(read_text(files.config))
        return int(config["cluster"][key])
    except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return 0


def explain(files: SubmissionFolder, folder: Path, job_id: str, code: int, started: float) -> str:
    """The run's own last error, else what srun said of its tasks, else the exit code."""
    log = folder / f"{job_id}_0_log.out"
    tasks = srun_errors(log)
    end = files.last_end(started)
    said = end.message if end is not None else last_error(sorted(folder.glob(f"{job_id}_*_log.out")))
    parts = [f"the job failed with exit code {code}{_signal_of(code)}", *tasks[:3], *([said] if said else [])]
    if code == -9 or any("Killed" in line or "Out Of Memory" in line for line in tasks):
        parts.append("a task was killed from outside: if nobody did, it was out of memory (--mem-gb)")
    return "; ".join(dict.fromkeys(parts))


def _signal_of(code: int) -> str:
    """A shell has 128 and the signal's number, Python minus the number."""
    number = -code if code < 0 else code - 128
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
