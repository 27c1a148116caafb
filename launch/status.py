"""`python -m launch.status [RUNS...]`: a table of runs, by default of all in `runs/`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedspec_dist.config.files import parse
from fedspec_dist.runs import events
from fedspec_dist.runs.folder import RunFolder
from fedspec_dist.runs.safe_files import read_text
from fedspec_dist.runs.streams import open_standard_streams
from launch import attempts, queue
from launch.commands import as_command, command
from launch.follow import outcome
from launch.logs import last_error, tail
from launch.outcomes import PENDING, RUNNING, UNFINISHED, in_use, other_host, read_outcome
from launch.record import Record, SubmissionFolder


@dataclass(frozen=True)
class Row:
    run: str
    state: str
    job_id: str
    rounds: str
    metric: str
    elapsed: str
    left: str
    error: str
    headline: str = "test_accuracy"  # what `metric` is of


_FILE_WIDTH = 500
_ERROR_WIDTH = 240  # the whole of it is in the log and in attempts.jsonl
COLUMNS = ("run", "state", "job", "round", "{}", "elapsed", "time left", "last error")


def rows(run_folders: Iterable[Path]) -> list[Row]:
    """One a run, in the given order; the queue is asked once for all of them."""
    files = [SubmissionFolder(path) for path in run_folders]
    records = {entry.run_folder: entry.record() for entry in files}
    slurm = queue.slurm_states(r.job_id for r in records.values() if r is not None and r.cluster == "slurm")
    return [_row(entry, records[entry.run_folder], slurm) for entry in files]


def _row(files: SubmissionFolder, record: Record | None, slurm: Mapping[str, queue.QueueState]) -> Row:
    state = _queue_state(record, slurm)
    happened = events.read(RunFolder(files.run_folder).events)
    headline, _ = events.headline(happened)
    metrics = _last_metrics(files.run_folder / "metrics.jsonl", headline)
    before, own, done = events.rounds_before(happened), _rounds(files), int(metrics.get("round", 0))
    total, seconds = before + own, metrics.get("seconds_mean")
    finished = files.finished()
    working = state if state and state.is_alive and not finished else None
    error = "" if finished else _error(files, record, state)
    return Row(
        run=files.run_folder.name,
        state=_state_text(files, record, state),
        job_id=record.job_id if record else "",
        rounds=f"{done}/{total}" if own else str(done),
        metric=f"{metrics['value']:.4f}" if metrics.get("value") is not None else "",
        headline=headline,
        elapsed=working.elapsed if working else _duration(None if seconds is None else seconds * (done - before)),
        left=_time_left(working, total - done, seconds) if working else "",
        error=error if len(error) <= _ERROR_WIDTH else f"{error[:_ERROR_WIDTH]}...",
    )


def _queue_state(record: Record | None, slurm: Mapping[str, queue.QueueState]) -> queue.QueueState | None:
    if record is None:
        return None
    if record.cluster == "local":
        return queue.local_state(record.job_id, record.folder, record.host)
    return slurm.get(record.job_id, queue.QueueState(queue.GONE))


def _state_text(files: SubmissionFolder, record: Record | None, state: queue.QueueState | None) -> str:
    if files.finished():
        return "finished"
    if record is None or state is None:
        return _state_by_itself(files.run_folder)
    if state.is_alive:
        return f"{state.name} ({state.reason})" if state.reason else state.name
    if in_use(files.run_folder):  # started by hand since, or still ending
        return RUNNING
    known = outcome(files, record, state)
    return known.state if known else queue.GONE


def _state_by_itself(run_folder: Path) -> str:
    """Of a run that no job of ours was started for, from what it wrote itself."""
    state = read_outcome(run_folder).state
    if state == PENDING:
        return "not started"
    if state != UNFINISHED:
        return state
    happened = events.read(RunFolder(run_folder).events)
    if (end := events.last_end(happened)) is not None:
        return end.name
    if host := other_host(run_folder):
        return f"started on {host}"
    return "killed" if happened else UNFINISHED  # an older version wrote no events


def _error(files: SubmissionFolder, record: Record | None, state: queue.QueueState | None) -> str:
    """Why it ended, as the job's account and the run itself say; else the last error of the job's logs."""
    if record is None:
        return read_outcome(files.run_folder).error
    if reason := files.diverged():
        return reason
    history = attempts.read(files.attempts, record.job_id)
    if history and history[-1].outcome in (attempts.FAILED, attempts.GAVE_UP, attempts.DIVERGED):
        return history[-1].reason
    ended = [attempt for attempt in history if attempt.end_round is not None]
    if ended and files.rounds_saved() <= (ended[-1].end_round or 0) and (said := attempts.stuck(ended)):
        return said
    if history and history[-1].outcome in attempts.SETTLED:
        return ""
    if state is not None and state.is_alive and (not history or history[-1].outcome is None):
        return ""  # waiting, or running well as far as is known
    end = files.last_end(history[-1].started if history else record.submitted)
    return end.message if end is not None else last_error(record.logs())


def _last_metrics(path: Path, headline: str) -> dict[str, Any]:
    """The newest value of the metric that counts, round, and seconds a round; of the last lines that are whole."""
    found: dict[str, Any] = {}
    seconds = []
    for line in tail(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("round"), int):
            value = _number(record.get(headline))
            found["round"] = record["round"]
            found["value"] = value if value is not None else found.get("value")
            seconds.append(_number(record.get("seconds_round")) or 0.0)
    if seconds:
        found["seconds_mean"] = sum(seconds) / len(seconds)
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _rounds(files: SubmissionFolder) -> int:
    for path in (files.run_folder / "config.yaml", files.config):
        try:
            return int(parse(read_text(path))["rounds"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _time_left(state: queue.QueueState, rounds: int, seconds: float | None) -> str:
    """The run's own estimate, and what the queue still grants."""
    own = f"about {_duration(seconds * rounds)}" if seconds else ""
    limit = f"limit {state.left}" if state.left and state.name == "RUNNING" else ""
    return ", ".join(filter(None, [own, limit]))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(found: Sequence[Row]) -> Table:
    """The metric's column has its name, where all rows are of one."""
    shown = Table(title_justify="left")
    headlines = {row.headline.removeprefix("test_").replace("_", " ") for row in found if row.metric}
    metric = headlines.pop() if len(headlines) == 1 else "metric"
    for column in COLUMNS:
        shown.add_column(column.format(metric), overflow="fold", no_wrap=column not in ("time left", "last error"))
    for row in found:
        cells = (row.run, row.state, row.job_id, row.rounds, row.metric, row.elapsed, row.left, row.error)
        shown.add_row(*(Text(cell) for cell in cells))  # brackets in an error are not markup
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.status", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", type=Path, help="run folders, or folders of them (runs)")
    given = parser.parse_args(arguments).runs
    found = {path: runs_in(path) for path in given or [Path("runs")]}
    missing = [path for path in given if not found[path]]
    for path in missing:
        print(
            f"{path}: is no run folder, and none is in it; a run's has a config.yaml or a submission", file=sys.stderr
        )
    folders = [run for runs in found.values() for run in runs]
    if not folders and not missing:
        print(f"no runs in runs/; name run folders, or submit one with {command('submit')}", file=sys.stderr)
        return 1
    if folders:
        console().print(table(rows(folders)))
    return 1 if missing else 0


def runs_in(path: Path) -> list[Path]:
    """The folder itself if it is a run's, else those in it."""
    return [path] if is_run(path) else sorted(below for below in path.glob("*") if is_run(below))


def console() -> Console:
    """As wide as the terminal; where the output goes elsewhere, wide enough for a run to have one line."""
    open_standard_streams()
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_FILE_WIDTH if wide else None)


def is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("config.yaml", "submission", "events.jsonl"))


if __name__ == "__main__":
    sys.exit(as_command(main))
