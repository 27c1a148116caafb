"""Reading what jobs wrote: the last error, srun's complaints, and a file as it grows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from fedspec_dist.runs.safe_files import open_regular, read_text

_TAIL_BYTES = 64 * 1024
# The console's lines begin with the rank, or with what went wrong.
_SHOWN = re.compile(r"^(?:\[rank \d+\] )?(?:config )?error: (.*)")
# Not KeyboardInterrupt: that is how a launcher ends the ranks that are left, after one has failed.
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*")
_SRUN = re.compile(r"^(?:srun|slurmstepd\S*): error: (.*)")


def tail(path: Path) -> list[str]:
    """The last lines of a file, none where there is none."""
    return read_text(path, _TAIL_BYTES).splitlines()


def last_error(job_logs: Iterable[Path]) -> str:
    """The last line of a job's logs that says what went wrong; empty without one.

    A last resort, for processes that died before the run could say what happened (its events.jsonl).
    """
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


class Tail:
    """What is new in a file since the last look, in whole lines."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._rest = b""
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> str:
        try:
            with open_regular(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # emptied
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
