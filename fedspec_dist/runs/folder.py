"""The folder of a run: names of its files, its lock, and what is written once at the start and at the end."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from fedspec_dist.core.failures import Kind
from fedspec_dist.runs.safe_files import open_own, read_object, remove_temporaries, write_whole


class OutputError(OSError):
    """A file of the run folder could not be written; the message says what to do."""

    kind = Kind.FILES


class InUseError(ValueError):
    """Another process works in the run folder."""

    kind = Kind.IN_USE


# How a run that has done all its rounds can have ended: with a result, or with numbers that are not finite.
ENDS = ("finished", "diverged")
_CHECKPOINT = re.compile(r"round-[0-9]{6,}")
# What a fresh start does not delete.
_KEPT = (".lock", ".meeting", "submission")


class RunFolder:
    """All paths below `<output>/<name>-<hash>`; creating one touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.clients = path / "clients.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model.safetensors"
        self.tensorboard = path / "tensorboard"
        self.plugins = path / "plugins"
        self.logs = path / "log"
        self.events = path / "events.jsonl"
        self._lock: IO[str] | None = None
        self._held: dict[Path, int] = {}

    def ended(self) -> dict[str, Any] | None:
        """The summary of a run that has done all its rounds, else None; its `status` is one of `ENDS`."""
        summary = read_object(self.summary)
        return summary if summary.get("status") in ENDS else None

    def open(self, fresh: bool) -> None:
        """Create the folder, take its lock and, with `fresh`, empty it.

        Raises:
            ValueError: the folder cannot be made, or another process runs in it. The lock belongs to the process, so a
                killed run leaves none.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(open_own(self.path / ".lock", os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8")
            self._take_lock(self._lock)
            if fresh:
                self._empty()
            remove_temporaries(self.path)
        except OSError as error:
            raise ValueError(
                f"output: the run folder {self.path} cannot be written: {error.strerror}; choose another output=FOLDER"
            ) from error
        self._refuse_what_is_in_the_way()
        self.hold(self.path / ".lock", self._lock)

    def hold(self, path: Path, file: IO[str]) -> None:
        """From now on `check` expects to find this open file at its path, also when it has been closed here."""
        self._held[path] = os.dup(file.fileno())

    def check(self) -> None:
        """That what this run has open is what lies in its folder, and that it is on the disk.

        Raises:
            OutputError: the folder or a file in it was deleted, moved or replaced; what the run would write now would
                be lost, or be mixed with another run's.
        """
        for path, descriptor in self._held.items():
            try:
                _sync(descriptor)
                here, there = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
                same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
            except FileNotFoundError:
                same = False
            except OSError as error:
                if error.errno != errno.ESTALE:  # of NFS: deleted on its server
                    raise cannot_write(path, error) from error
                same = False
            if not same:
                raise OutputError(
                    f"{path} was deleted, moved or replaced while this run was at work, so it ends here and saves no "
                    f"more. Put the whole run folder back to {self.path} and start the same command again to resume "
                    "from its newest checkpoint, or start over with --fresh or another output=FOLDER"
                )

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        if self._lock is not None:
            self._lock.close()

    def _refuse_what_is_in_the_way(self) -> None:
        """Now, not after hours of training."""
        files = (self.config, self.environment, self.metrics, self.summary, self.model)
        folders = (self.checkpoints, self.tensorboard, self.plugins, self.logs)
        wrong = [path for path in files if path.exists() and not path.is_file()]
        wrong += [path for path in folders if path.exists() and not path.is_dir()]
        if wrong:
            found = "no folder" if wrong[0] in folders else "no regular file"
            raise ValueError(
                f"output: {wrong[0]} is {found}, so this run cannot write there; delete it, or choose another "
                "output=FOLDER"
            )

    def _empty(self) -> None:
        """For a fresh start; how this one was submitted and where its ranks meet is of the present, not of the past."""
        # First what would make a later start believe in the rest, should this one be killed in between.
        self.summary.unlink(missing_ok=True)
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry != self.checkpoints):
            if entry.name not in _KEPT:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _take_lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUseError(
                f"output: the run folder {self.path} is in use by {file.read().strip() or 'another process'}; wait for "
                "it, stop it, or give this run another name= or output="
            ) from None
        except OSError:
            # Some network file systems have no locks; a run without one is better than none.
            logging.getLogger(__name__).info("no file locks on %s: two runs in one folder go unnoticed", self.path)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()


def checkpoints_in(folder: Path) -> list[Path]:
    """What has the name of a checkpoint, newest first; whether it is one, its reader finds out."""
    named = [path for path in folder.glob("round-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted(named, key=round_of, reverse=True)


def round_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("round-"))


def write_text(path: Path, text: str) -> None:
    """A whole file, renamed into place.

    Raises:
        OutputError: the disk is full or cannot be written; what was there before stays.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented JSON, renamed into place; see `write_text`."""
    write_text(path, json.dumps(finite_or_null(content), indent=1, allow_nan=False) + "\n")


def finite_or_null(value: Any) -> Any:
    """The same with None for NaN and infinities: JSON has no form for them, and strict readers refuse Python's."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    return [finite_or_null(item) for item in value] if isinstance(value, (list, tuple)) else value


def cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path} could not be written: {error.strerror or error}. Checkpoints are untouched: free space or mend the "
        "disk, then start the same command again to resume"
    )


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and whether files differ from it, of the checkout that holds `folder`; empty outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


class _RankFormatter(logging.Formatter):
    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__("%(message)s")
        self._prefix = f"[rank {rank}] " if num_ranks > 1 else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._prefix if record.levelno > logging.INFO else ''}{level}{super().format(record)}"


def log_to_console(rank: int, num_ranks: int, debug: bool = False) -> None:
    """Rank 0 says what it does; the others only warn, prefixed with their rank. Warnings of libraries included."""
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING)
    handler.setFormatter(_RankFormatter(rank, num_ranks))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("fedspec_dist").setLevel(logging.DEBUG)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise


class _LogFile(logging.FileHandler):
    def _open(self) -> io.TextIOWrapper:
        descriptor = open_own(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND)
        return io.TextIOWrapper(os.fdopen(descriptor, "ab"), encoding=self.encoding, errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A full disk ends the log file; whether it also ends the run is for the checkpoint to find out."""
        logging.getLogger().removeHandler(self)
        logging.getLogger(__name__).warning("%s cannot be written; no more goes there", self.baseFilename)


def log_to_file(folder: RunFolder, rank: int) -> None:
    """Everything, tracebacks included, to `log/rank-N.log`, appended over restarts."""
    path = folder.logs / f"rank-{rank}.log"
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    handler = _LogFile(path, delay=True, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
