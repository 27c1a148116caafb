"""What is known of jobs: from squeue, from sacct where accounting is there, from processes for `--cluster local`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_TIMEOUT_S = 30.0
_FORMAT = "%i|%T|%r|%M|%L"  # job id, state, reason, time used, time left
# SLURM's states of a job that will not run again by itself; any other counts as alive, unknown ones included.
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
# Variables of a shell that change what the commands show, which would hide jobs.
_SHOWING = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
GONE = "not in the queue"
CONTROLLER = "launch.local"  # the module that a local job is
UNKNOWN = "unknown"


@dataclass(frozen=True)
class QueueState:
    """`name` is SLURM's state, `GONE`, or `UNKNOWN` when the scheduler did not answer."""

    name: str
    reason: str = ""
    elapsed: str = ""
    left: str = ""

    @property
    def is_alive(self) -> bool:
        return self.name != GONE and self.name not in ENDED


class QueueError(RuntimeError):
    """A command of the scheduler was refused; the message has what it said."""


def slurm_states(job_ids: Iterable[str]) -> dict[str, QueueState]:
    """The state of each job. Jobs that squeue has forgotten are asked of sacct, which may not be there."""
    wanted = list(dict.fromkeys(job_ids))
    if not wanted:
        return {}
    try:
        text = _squeue(wanted)
    except QueueError as error:
        return {job_id: QueueState(UNKNOWN, str(error)) for job_id in wanted}
    found = parse_squeue(text)
    missing = [job_id for job_id in wanted if job_id not in found]
    if missing:
        found |= parse_sacct(_sacct(missing))
    return {job_id: found.get(job_id, QueueState(GONE)) for job_id in wanted}


def slurm_state(job_id: str) -> QueueState:
    return slurm_states([job_id])[job_id]


def local_state(job_id: str, folder: str, host: str) -> QueueState:
    """Of our controller, a process of this machine whose command line has its folder: process ids repeat."""
    if host != socket.gethostname():
        return QueueState(UNKNOWN, f"started on {host}")
    if not folder or not re.fullmatch(r"[1-9][0-9]*", job_id):
        return QueueState(GONE)
    try:
        words = Path(f"/proc/{job_id}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return QueueState(GONE)
    is_controller = (CONTROLLER, folder) in pairwise(words)
    return QueueState("RUNNING") if is_controller else QueueState(GONE)


def parse_squeue(text: str) -> dict[str, QueueState]:
    found = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 5:
            job_id, name, reason, elapsed, left = (part.strip() for part in parts)
            found[job_id] = QueueState(name, "" if reason == "None" else reason, elapsed, left)
    return found


def parse_sacct(text: str) -> dict[str, QueueState]:
    """Lines of `JobID|State`; the state of a cancelled job is "CANCELLED by UID"."""
    found = {}
    for line in text.splitlines():
        job_id, _, name = line.partition("|")
        if name.strip():
            found[job_id.strip()] = QueueState(name.split()[0])
    return found


def _squeue(job_ids: list[str]) -> str:
    command = ["squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}", f"--jobs={','.join(job_ids)}"]
    try:
        return run_command(command)
    except QueueError as error:
        if "Invalid job id" in str(error):  # a single job that ended more than MinJobAge ago
            return ""
        raise


def _sacct(job_ids: list[str]) -> str:
    if shutil.which("sacct") is None:
        return ""
    try:
        return run_command(
            [
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--format=JobID,State",
                f"--jobs={','.join(job_ids)}",
            ]
        )
    except QueueError:  # "Slurm accounting storage is disabled"
        return ""


def run_command(command: list[str]) -> str:
    """What it prints, whatever the user's shell would have it show (`SQUEUE_PARTITION` and the like).

    Raises:
        QueueError: with the command's own words.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_SHOWING)}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, env=variables, timeout=_TIMEOUT_S, **pipes)
    except FileNotFoundError:
        raise QueueError(f"there is no {command[0]} on this machine: is it a login node of a SLURM cluster?") from None
    except subprocess.TimeoutExpired:
        raise QueueError(f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise QueueError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def job_fields(job_id: str) -> Mapping[str, str]:
    """`scontrol show job` as a mapping; empty when it is not known any more.

    Raises:
        QueueError: the scheduler did not answer.
    """
    try:
        text = run_command(["scontrol", "show", "job", "--oneliner", job_id])
    except QueueError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    return dict(re.findall(r"(\w+)=(\S*)", text))


# SLURM's own where the site sets none.
_MAX_ARRAY_SIZE = 1001


def max_array_size() -> int:
    """How many runs a job array of this site can have; what SLURM has by default where it does not say."""
    try:
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_command(["scontrol", "show", "config"]), re.MULTILINE)
    except QueueError:
        found = None
    return max(1, int(found[1])) if found else _MAX_ARRAY_SIZE


def requeue(job_id: str) -> None:
    """Raises:
    QueueError: the scheduler refused.
    """
    run_command(["scontrol", "requeue", job_id])
