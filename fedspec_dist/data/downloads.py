"""Downloads into a folder that processes of one host or of several may want to fill at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedspec_dist.data.temporary import remove_leftovers, temporary_name

_TIMEOUT_S = 30.0
_POLL_S = 0.2


def download_into(root: Path, name: str, is_there: Callable[[], bool], download: Callable[[Path], object]) -> None:
    """Let `download` fill a folder of its own, then put its files below `root`, each as a whole.

    Processes do so one after the other, and who comes later finds the files there; on a file system without locks they
    may do it all at once, and equal files take each other's place.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{name}.lock"):
        if is_there():
            return
        remove_leftovers(root)
        folder = temporary_name(root / name)
        try:
            # The downloader prints a progress bar and every mirror it tries; the outcome is all a rank should say.
            with _socket_timeout(_TIMEOUT_S), contextlib.redirect_stdout(io.StringIO()):
                download(folder)
            for path in filter(Path.is_file, folder.rglob("*")):
                target = root / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; asked for again and again, so that a signal ends the waiting."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # no locks here
            time.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Without it, a compute node whose packets are dropped hangs for minutes instead of failing."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
