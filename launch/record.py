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
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedspec_dist.tracking.safe_files import create, temporary_name


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
        """The last submission, None for a run that was never submitted."""
        content = read_json(self.job)
        try:
            return Record(**content) if content else None
        except TypeError:
            return None

    def write_record(self, record: Record) -> None:
        write(self.job, json.dumps(asdict(record), indent=1) + "\n")

    def is_cancelled(self, job_id: str) -> bool:
        try:
            return self.cancelled.read_text(encoding="utf-8").strip() == job_id
        except OSError:
            return False

    def rounds_saved(self) -> int:
        """The newest checkpoint's round by its name; the run itself verifies what is in it."""
        found = (self.run_folder / "checkpoints").glob("round-*")
        return max((int(path.name[6:]) for path in found if path.name[6:].isdecimal()), default=0)

    def finished(self) -> bool:
        return read_json(self.run_folder / "summary.json").get("status") == "finished"


def new_name() -> str:
    """For the folder of a submission."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no whole file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write(path: Path, text: str) -> None:
    """A whole file, renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with os.fdopen(create(temporary), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# Beside submitit's files: which run each place of the job array is. The batch script knows its folder only.
_RUNS = "runs.json"


def write_runs(folder: Path, run_folders: list[Path]) -> None:
    write(folder / _RUNS, json.dumps({"runs": [str(path) for path in run_folders]}, indent=1) + "\n")


def run_of(folder: Path, place: int) -> Path:
    return Path(read_json(folder / _RUNS)["runs"][place])
