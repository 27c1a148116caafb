"""What has become of a run, read from its folder alone."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from launch.axes import Run

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
RUNNING, QUEUED, UNFINISHED, PENDING = "running", "queued", "unfinished", "pending"

# Where the local pool puts what a run prints.
CONSOLE = Path("log", "console.log")

# Of the log files: `2026-01-31 12:00:00,123 LEVEL module: text`, the text going on over lines of another form.
_RECORD = re.compile(r"^(?P<time>\d{4}-\d\d-\d\d [\d:,]{12}) (?P<level>[A-Z]+) (?P<module>[\w.]+): (?P<text>.*)")
_HOLDER_BYTES = 1000  # more than any line of a lock
_START = re.compile(r"rank \d+ of \d+ on ")
_NONFINITE = re.compile(r"non-finite|not finite|NaN or infinite")
# In what a run says that `runtime.on_nonfinite=skip` takes past its bad client.
_CAN_SKIP = "runtime.on_nonfinite=skip"


@dataclass(frozen=True)
class Outcome:
    """State, metrics so far, summary (empty unless finished) and the error that ended it."""

    state: str
    records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def complete(self) -> bool:
        """Whether it has a result: that it diverged is one."""
        return self.state in (FINISHED, DIVERGED)

    @property
    def round(self) -> int:
        return int(self.records[-1]["round"]) if self.records else 0

    def score(self, metric: str, last: int) -> float | None:
        """Mean of the last values of a metric; None for a run that diverged or has none."""
        values = [record[metric] for record in self.records if record.get(metric) is not None]
        return mean(values[-last:]) if values and self.state == FINISHED else None

    def last(self, metric: str) -> float | None:
        """The last value."""
        return next((record[metric] for record in reversed(self.records) if record.get(metric) is not None), None)

    def best(self, metric: str) -> tuple[float, int] | None:
        """The largest value, the first of equals, and its round."""
        values = [(record[metric], record["round"]) for record in self.records if record.get(metric) is not None]
        return max(values, key=lambda item: item[0]) if values else None


class Outcomes:
    """Outcomes of runs; those that are complete are read once. With `fresh`, runs begin with `start_over`."""

    def __init__(self, fresh: bool = False) -> None:
        self._complete: dict[Path, Outcome] = {}
        self._fresh = fresh
        self._begun: set[Path] = set()

    def start_over(self, run: Run) -> None:
        """Empty the folder of a run before its first start, if that is wanted.

        Raises:
            ValueError: another process is at work in it, or it cannot be written.
        """
        from fedspec_dist.tracking.run_folder import RunFolder

        if self._fresh and run.folder not in self._begun:
            if run.folder.exists():
                folder = RunFolder(run.folder)
                folder.open(fresh=True)
                folder.close()
            self._begun.add(run.folder)

    def __call__(self, run: Run) -> Outcome:
        if self._fresh and run.folder not in self._begun:
            return Outcome(PENDING)
        if run.folder not in self._complete:
            outcome = read_outcome(run.folder, skips=run.config.runtime.on_nonfinite == "skip")
            if not outcome.complete:
                return outcome
            self._complete[run.folder] = outcome
        return self._complete[run.folder]


def read_outcome(folder: Path, skips: bool = False) -> Outcome:
    """`skips`: whether the run would go on past a bad client, so that having stopped at one is no result."""
    # Not at the top: this folder starts from the config alone. Neither imports torch.
    from fedspec_dist.tracking.metrics import read
    from fedspec_dist.tracking.run_folder import RunFolder

    files = RunFolder(folder)
    if (summary := files.finished()) is not None:
        return Outcome(FINISHED, read(files.metrics), summary)
    if not files.logs.exists():
        return Outcome(PENDING)
    records = read(files.metrics)
    if _in_use(folder / ".lock"):
        return Outcome(RUNNING, records)
    error = last_error(files.logs)
    if not error:
        return Outcome(UNFINISHED, records)
    diverged = _NONFINITE.search(error) and not (skips and _CAN_SKIP in error)
    return Outcome(DIVERGED if diverged else FAILED, records, error=error)


def last_error(logs: Path) -> str:
    """The error that ended a run's last start, on whichever rank it was; empty when none did."""
    by_rank = {path: _records(path) for path in sorted(logs.glob("rank-*.log"))}
    starts = [time for time, _, text in by_rank.get(logs / "rank-0.log", []) if _START.match(text)]
    started = starts[-1] if starts else ""
    errors = [
        (time, text)
        for records in by_rank.values()
        for time, level, text in records
        if level in ("ERROR", "CRITICAL") and time >= started
    ]
    return max(errors)[1].strip() if errors else ""


def _records(path: Path) -> list[tuple[str, str, str]]:
    """Time, level and text of each record, all lines of it."""
    records: list[tuple[str, str, str]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _RECORD.match(line):
            records.append((found["time"], found["level"], found["text"]))
        elif records:
            time, level, text = records[-1]
            records[-1] = (time, level, f"{text}\n{line}")
    return records


def _in_use(lock: Path) -> bool:
    """Whether a process of this host holds the lock of a run; without taking it, which would be in its way."""
    from fedspec_dist.tracking.safe_files import open_regular

    try:
        with open_regular(lock) as file:
            inode, holder = os.fstat(file.fileno()).st_ino, file.read(_HOLDER_BYTES).decode("utf-8", "replace").strip()
        held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    here = holder.endswith(f" on {socket.gethostname()}") or holder.endswith(f" on {os.uname().nodename}")
    return here and any(" FLOCK " in line and f":{inode} " in line for line in held)
