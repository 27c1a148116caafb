"""The files of a submission, in `submission/` of the run folder.

config.yaml      the resolved config, which the job runs: later edits of the user's file do not reach it
command.txt      what was typed, and the same run without a launcher
git.json         state of the code
job.json         job id, cluster, logs
attempts.jsonl   starts and ends of the job's processes, see attempts.py
cancelled        id of the job that launch.cancel ended
jobs/            submitit's files and the logs, one folder a submission, since job ids may repeat
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedspec_dist.runs import events
from fedspec_dist.runs.events import Event
from fedspec_dist.runs.folder import RunFolder
from fedspec_dist.runs.safe_files import read_object, read_text, write_whole

# Of SLURM, with the place in an array, and of processes.
_JOB_ID = re.compile(r"[1-9][0-9]{0,18}(_[0-9]{1,9})?")
_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Record:
    """`job.json`."""

    job_id: str
    cluster: str
    folder: str  # submitit's
    ranks: int
    nodes: int
    time: str
    host: str
    submitted: float  # seconds since 1970

    def log(self, rank: int = 0) -> Path:
        return Path(self.folder) / f"{self.job_id}_{rank}_log.out"

    def logs(self) -> list[Path]:
        return [self.log(rank) for rank in range(self.ranks)]


class SubmissionFolder:
    """Paths below `<run folder>/submission`; creating one touches nothing."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.path = run_folder / "submission"
        self.config = self.path / "config.yaml"
        self.command = self.path / "command.txt"
        self.git = self.path / "git.json"
        self.job = self.path / "job.json"
        self.attempts = self.path / "attempts.jsonl"
        self.cancelled = self.path / "cancelled"
        self.jobs = self.path / "jobs"

    def record(self) -> Record | None:
        """The last submission, None for a run that was never submitted, or whose `job.json` is not of our making."""
        content = read_object(self.job)
        try:
            given = Record(**content)
        except TypeError:
            return None
        numbers, texts = (
            (given.ranks, given.nodes, given.submitted),
            (given.cluster, given.folder, given.time, given.host),
        )
        known = all(type(number) in (int, float) for number in numbers) and all(isinstance(text, str) for text in texts)
        # An id is given to commands, and ranks are counted.
        if not known or not _JOB_ID.fullmatch(str(given.job_id)) or not 0 < given.ranks <= _MOST_RANKS:
            return None
        return given

    def write_record(self, record: Record) -> None:
        write(self.job, json.dumps(asdict(record), indent=1) + "\n")

    def is_cancelled(self, job_id: str) -> bool:
        return read_text(self.cancelled).strip() == job_id

    def is_ours(self, folder: str) -> bool:
        """Whether this folder of submitit's belongs to this run: only a job from there may be ended in its name."""
        parents = (self.jobs, self.run_folder.parent / ".arrays")
        return os.path.realpath(Path(folder).parent) in map(os.path.realpath, parents) if folder else False

    def rounds_saved(self) -> int:
        """The newest checkpoint's round by its name; the run itself verifies what is in it."""
        found = (self.run_folder / "checkpoints").glob("round-*")
        return max((int(path.name[6:]) for path in found if path.name[6:].isdecimal()), default=0)

    def finished(self) -> bool:
        return self._summary().get("status") == "finished"

    def diverged(self) -> str:
        """Why a run that has done all its rounds has no result; empty for any other."""
        return str(self._summary().get("reason", "")) if self._summary().get("status") == "diverged" else ""

    def last_end(self, since: float = 0.0) -> Event | None:
        """How the run itself says that its last start ended; `since`, in seconds since 1970: nothing before counts."""
        return events.last_end(events.read(RunFolder(self.run_folder).events), since)

    def _summary(self) -> dict[str, Any]:
        return RunFolder(self.run_folder).ended() or {}


def new_name() -> str:
    """For the folder of a submission."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def write(path: Path, text: str) -> None:
    """A whole file, renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


# Beside submitit's files: which run each place of the job array is. The batch script knows its folder only.
_RUNS = "runs.json"


def write_runs(folder: Path, run_folders: list[Path]) -> None:
    write(folder / _RUNS, json.dumps({"runs": [str(path) for path in run_folders]}, indent=1) + "\n")


def run_of(folder: Path, place: int) -> Path:
    """Raises:
    ValueError: `runs.json` of that folder is gone or damaged.
    """
    runs = read_object(folder / _RUNS).get("runs")
    if not isinstance(runs, list) or place >= len(runs) or not isinstance(runs[place], str):
        raise ValueError(f"{folder / _RUNS}: does not say which run place {place} of this job is; submit the run again")
    return Path(runs[place])
