"""Does a folder do what runs rely on: all ranks see one file, and a rename shows the old file or the new one whole?

Each function is one rank's part; who calls them lets the ranks wait for each other in between. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SEEN_WITHIN_S = 5.0
_RENAMES_S = 0.5
_RENAMED = "renamed"
_CONTENTS = (b"a" * 5000, b"b" * 9000)


@dataclass(frozen=True)
class FolderFacts:
    """Of one rank."""

    problem: str = ""  # why the folder cannot be made or written here
    sees_others: bool = True  # rank 0's file, with its content
    seconds_to_see: float = 0.0
    renames_torn: int = 0  # times that a file being renamed over was neither the old one nor the new one
    renames_missed: int = 0  # times that it was not there
    reads: int = 0
    locks: bool = True
    free_bytes: int = 0


def make(folder: Path) -> str:
    """Make the folder and its parents; what went wrong, or nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def write(folder: Path, rank: int, token: str) -> str:
    """Leave this rank's file; what went wrong, or nothing."""
    try:
        (folder / f"rank-{rank}").write_text(token)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def sees(folder: Path, rank: int, token: str, within_s: float = _SEEN_WITHIN_S) -> tuple[bool, float]:
    """Whether that rank's file is seen here, and after how many seconds; network file systems may take a moment."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # makes NFS ask the server again
            if (folder / f"rank-{rank}").read_text() == token:
                return True, time.monotonic() - began
        if time.monotonic() - began > within_s:
            return False, time.monotonic() - began
        time.sleep(0.05)


def unseen(folder: Path, num_ranks: int, token: str, within_s: float = _SEEN_WITHIN_S) -> list[int]:
    """Ranks whose files are not seen here."""
    deadline = time.monotonic() + within_s
    return [rank for rank in range(num_ranks) if not sees(folder, rank, token, max(0, deadline - time.monotonic()))[0]]


@contextlib.contextmanager
def renaming(folder: Path) -> Iterator[None]:
    """Files of two contents replace each other for as long as this is open."""
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        count = 0
        with contextlib.suppress(OSError):
            while not stop.is_set():
                count += 1
                temporary = folder / ".renamed"
                temporary.write_bytes(_CONTENTS[count % 2])
                os.replace(temporary, folder / _RENAMED)
                begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait(_SEEN_WITHIN_S)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def read_while_renamed(folder: Path, seconds: float = _RENAMES_S) -> tuple[int, int, int]:
    """Reads; how many of them found neither content whole; how many no file, after the first that found one."""
    reads = torn = missed = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            content = (folder / _RENAMED).read_bytes()
        except OSError:
            missed += reads > 0
            time.sleep(0.0005)
            continue
        reads += 1
        torn += content not in _CONTENTS
    return reads, torn, missed


def can_lock(folder: Path, rank: int) -> bool:
    try:
        with (folder / f"lock-{rank}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def remove(folder: Path) -> None:
    """The folder, and the one around it if the doctor was the first to need it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
