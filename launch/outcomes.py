"""What has become of a run, read from what it wrote into its folder: summary, events, metrics."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from fedspec_dist.runs import events
from fedspec_dist.runs.folder import RunFolder
from fedspec_dist.runs.safe_files import read_text
from fedspec_dist.runs.trackers import metrics
from launch.axes import Run

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
RUNNING, QUEUED, UNFINISHED, PENDING = "running", "queued", "unfinished", "pending"

# Where the local pool puts what a run prints.
CONSOLE = Path("log", "console.log")


@dataclass(frozen=True)
class Outcome:
    """State, metrics so far, summary (empty unless finished) and the error that ended it."""

    state: str
    records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    headline: tuple[str, str] = ("test_accuracy", "max")  # the metric that counts, and its direction
    rounds_before: int = 0  # of the run that it branched from; rounds are counted on from there

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

    def best(self) -> tuple[float, int] | None:
        """The best value of the metric that counts, the first of equals, and its round."""
        metric, direction = self.headline
        values = [(record[metric], record["round"]) for record in self.records if record.get(metric) is not None]
        sign = 1 if direction == "max" else -1
        return max(values, key=lambda item: sign * item[0]) if values else None


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
        from fedspec_dist.runs.folder import RunFolder

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
    files = RunFolder(folder)
    records = metrics.read(files.metrics)
    happened = events.read(files.events)
    said: dict[str, Any] = {"headline": events.headline(happened), "rounds_before": events.rounds_before(happened)}
    if (summary := files.ended()) is not None:
        diverged = summary["status"] == DIVERGED
        return Outcome(DIVERGED if diverged else FINISHED, records, summary, str(summary.get("reason", "")), **said)
    if not happened and not files.logs.exists():
        return Outcome(PENDING)
    if in_use(folder):
        return Outcome(RUNNING, records, **said)
    end = events.last_end(happened)
    if end is None or end.name not in (events.FAILED, events.DIVERGED):
        return Outcome(UNFINISHED, records, **said)
    diverged = end.name == events.DIVERGED and not (skips and events.diverged_at_a_client(end))
    return Outcome(DIVERGED if diverged else FAILED, records, error=end.message, **said)


def in_use(folder: Path) -> bool:
    """Whether a process of this host holds the lock of a run; without taking it, which would be in its way."""
    from fedspec_dist.runs.safe_files import open_regular

    try:
        with open_regular(folder / ".lock") as file:
            inode = os.fstat(file.fileno()).st_ino
        held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return not other_host(folder) and any(" FLOCK " in line and f":{inode} " in line for line in held)


def other_host(folder: Path) -> str:
    """The host of the run's last process, of whose locks nothing is known here; empty for this one, and for none."""
    _, _, host = read_text(folder / ".lock", last=1000).strip().rpartition(" on ")
    return "" if host in (socket.gethostname(), os.uname().nodename) else host
