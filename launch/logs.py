"""Reading what jobs wrote: the last error, srun's complaints, and a file as it grows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 64 * 1024
# log/rank-N.log has times and levels; the console's lines begin with the rank, or with what went wrong.
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:ERROR|CRITICAL) \S+: (.*)")
_SHOWN = re.compile(r"^(?:\[rank \d+\] )?(?:config )?error: (.*)")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")
_SRUN = re.compile(r"^(?:srun|slurmstepd\S*): error: (.*)")


def tail(path: Path) -> list[str]:
    """The last lines of a file, none where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_error(run_folder: Path, job_logs: Iterable[Path]) -> str:
    """The last line of the run's own logs, else of the job's, that says what went wrong; empty without one."""
    for path in sorted((run_folder / "log").glob("rank-*.log"), key=_written, reverse=True):
        found = [match[1] for line in tail(path) if (match := _LOGGED.match(line))]
        if found:
            return found[-1]
    for pattern in (_SHOWN, _RAISED, _SRUN):
        for path in job_logs:
            lines = [match[match.lastindex or 0] for line in tail(path) if (match := pattern.match(line))]
            if lines:
                return lines[-1]
    return ""


def srun_errors(path: Path) -> list[str]:
    """What srun said of tasks since the last start, oldest first."""
    found: list[str] = []
    for line in tail(path):
        if "submitit INFO" in line and "Starting with" in line:
            found = []
        elif (match := _SRUN.match(line)) and "task" in match[1]:
            found.append(match[1])
    return found


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
