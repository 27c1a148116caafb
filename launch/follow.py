"""Waiting for a job, and showing rank 0's log while it runs. Ctrl-C ends the showing, not the job."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import attempts, queue
from launch.commands import as_command, command
from launch.logs import Tail, last_error
from launch.record import Record, SubmissionFolder

EXIT_DIVERGED = 3
_POLL_S = 1.0
# A job between two attempts may look ended for a moment; files on a network file system come late.
_SETTLE_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """`state` is a word or two, `text` has the reason as well."""

    finished: bool
    state: str
    reason: str = ""

    @property
    def text(self) -> str:
        return f"{self.state}{self.reason}"


def queue_state(record: Record) -> queue.QueueState:
    if record.cluster == "local":
        return queue.local_state(record.job_id, record.folder, record.host)
    return queue.slurm_state(record.job_id)


def outcome(files: SubmissionFolder, record: Record, state: queue.QueueState) -> Outcome | None:
    """How the job ended, as far as its files and the queue tell; None when they leave it open."""
    if files.finished():
        return Outcome(True, "finished")
    if reason := files.diverged():
        return Outcome(False, attempts.DIVERGED, f": {reason}")
    history = attempts.read(files.attempts, record.job_id)
    if history and history[-1].outcome == attempts.FINISHED:  # a health check
        return Outcome(True, "finished")
    if history and history[-1].outcome not in (None, attempts.REQUEUED, attempts.RETRIED):
        last = history[-1]
        return Outcome(False, f"{last.outcome}", f" after {last.end_round} rounds: {last.reason}")
    if files.is_cancelled(record.job_id):
        return Outcome(False, "cancelled")
    if state.name in queue.ENDED and state.name != "COMPLETED":
        return Outcome(False, f"ended by SLURM: {state.name}", f" ({state.reason})" if state.reason else "")
    return None


def wait(
    run_folder: Path,
    show: Callable[[str], None] | None = None,
    poll_s: float = _POLL_S,
    settle_s: float = _SETTLE_S,
) -> Outcome:
    """Until the job is over. With `show`, what rank 0 writes and how the job moves through the queue."""
    files = SubmissionFolder(run_folder)
    record = files.record()
    if record is None:
        raise ValueError(f"{run_folder}: was not submitted by launch.submit, so there is no job to wait for")
    log = Tail(record.log())
    shown, ended_at = "", None
    while True:
        state = queue_state(record)
        if show is not None:
            now = f"{state.name}{f' ({state.reason})' if state.reason else ''}"
            if now != shown and (shown or state.name != queue.GONE):  # not before it is there
                shown = now
                show(f"job {record.job_id}: {now}\n")
            if text := log.read():
                show(text)
        # Where the queue cannot be asked the files may tell.
        if not state.is_alive or (state.name == queue.UNKNOWN and files.finished()):
            # Not at once: the account of the end may be on its way, and a job that is requeued ends first.
            ended_at = ended_at or time.monotonic()
            known = outcome(files, record, state)
            if known is not None and (known.finished or time.monotonic() - ended_at > min(2.0, settle_s)):
                break
            if time.monotonic() - ended_at > settle_s:
                end = files.last_end(attempts.last_start(files.attempts, record.job_id))
                said = end.message if end is not None else last_error(record.logs())
                known = Outcome(False, "ended without an account of it", f": {said}" if said else "")
                break
        else:
            ended_at = None
        time.sleep(poll_s)
    if show is not None and (text := log.close()):
        show(text)
    return known


def follow_and_report(run_folder: Path, follow: bool) -> int:
    """0 for a finished run, 3 for one that diverged, 1 for another end, 130 when Ctrl-C ended the waiting."""

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        found = wait(run_folder, show if follow else None)
    except KeyboardInterrupt:
        print(f"\nno longer waiting; the job goes on. {command('cancel')} {run_folder} ends it", file=sys.stderr)
        return 130
    print(f"{run_folder}: {found.text}", file=sys.stdout if found.finished else sys.stderr)
    return 0 if found.finished else EXIT_DIVERGED if found.state == attempts.DIVERGED else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.follow", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    try:
        return follow_and_report(parser.parse_args(arguments).run, follow=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(as_command(main))
