"""Reading what jobs wrote: the last error, srun's complaints, and a file as it grows."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 64 * 1024
# log/rank-N.log has times and levels; the console's lines begin with the rank, or with what went wrong.
_LOGGED = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (?:ERROR|CRITICAL) \S+: (.*)")
_SHOWN = re.compile(r"^(?:\[rank \d+\] )?(?:config )?error: (.*)")
# Not KeyboardInterrupt: that is how a launcher ends the ranks that are left, after one has failed.
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*")
_SRUN = re.compile(r"^(?:srun|slurmstepd\S*): error: (.*)")


def tail(path: Path) -> list[str]:
    """The last lines of a file, none where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_error(run_folder: Path, job_logs: Iterable[Path], since: float = 0.0) -> str:
    """The last line of the run's own logs, else of the job's, that says what went wrong; empty without one.

    `since`: when the last attempt started, in seconds since 1970; what earlier ones died of is another matter.
    """
    for path in sorted((run_folder / "log").glob("rank-*.log"), key=_written, reverse=True):
        found = [m[2] for line in tail(path) if (m := _LOGGED.match(line)) and _time(m[1]) >= int(since)]
        if found:
            return found[-1]
    for pattern in (_SHOWN, _RAISED, _SRUN):
        for path in job_logs:
            lines = [m[m.lastindex or 0] for line in _last_start(tail(path)) if (m := pattern.match(line))]
            if lines:
                # That a program is missing says more than that its task has ended.
                return next((line for line in lines if "execve()" in line), lines[-1])
    return ""


def srun_errors(path: Path) -> list[str]:
    """What srun said of tasks since the last start, oldest first."""
    found = [match[1] for line in _last_start(tail(path)) if (match := _SRUN.match(line))]
    return [line for line in found if "task" in line]


def _last_start(lines: list[str]) -> list[str]:
    """A log goes on over all attempts of its job; each begins with what submitit says."""
    starts = [number for number, line in enumerate(lines) if "submitit INFO" in line and "Starting with" in line]
    return lines[starts[-1] :] if starts else lines


def _time(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class Tail:
    """What is new in a file since the last look, in whole lines."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._rest = b""
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> str:
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._offset:  # emptied
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return ""
        self._offset += len(new)
        whole, newline, self._rest = (self._rest + new).rpartition(b"\n")
        return (whole + newline).decode(errors="replace")

    def close(self) -> str:
        """What is left, without its end of line."""
        text = self.read() + self._rest.decode(errors="replace")
        self._rest = b""
        return text
