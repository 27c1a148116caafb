"""`python -m launch.cancel RUN...`: end the jobs of these run folders; what is saved stays, submit again to go on."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import queue
from launch.commands import as_command
from launch.follow import queue_state
from launch.record import Record, SubmissionFolder, write


def cancel(run_folder: Path) -> str:
    """What was done. The mark comes first: the job must not take the signal for a reason to requeue.

    Raises:
        ValueError: there is no job of this run here.
        QueueError: the scheduler refused.
    """
    files = SubmissionFolder(run_folder)
    record = files.record()
    if record is None:
        raise ValueError(f"{run_folder}: was not submitted by launch.submit; allowed: run folders with a submission")
    if not files.is_ours(record.folder):
        raise ValueError(f"{run_folder}: its job.json is of another run's job, which is left alone; was it moved here?")
    state = queue_state(record)
    if not state.is_alive:
        return f"{run_folder}: job {record.job_id} has already ended"
    write(files.cancelled, f"{record.job_id}\n")
    try:
        _end(record, state)
    except queue.QueueError:
        files.cancelled.unlink(missing_ok=True)
        raise
    return f"{run_folder}: job {record.job_id} cancelled"


def _end(record: Record, state: queue.QueueState) -> None:
    if record.cluster == "slurm":
        log = queue.job_fields(record.job_id).get("StdOut", "")
        # Ids repeat, and a file can say anything. scontrol's line is cut at a space.
        if log and not log.startswith(f"{record.folder}/".split()[0]):
            raise queue.QueueError(f"job {record.job_id} is not of this run: its log is {log}. Nothing was cancelled")
        queue.run_command(["scancel", record.job_id])
        return
    if state.name == queue.UNKNOWN:
        raise queue.QueueError(f"the job was started on {record.host}; cancel it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(record.job_id), signal.SIGTERM)  # the controller passes it on to the tasks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.cancel", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder")
    failed = 0
    for run_folder in parser.parse_args(arguments).runs:
        try:
            print(cancel(run_folder))
        except (ValueError, queue.QueueError) as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(as_command(main))
