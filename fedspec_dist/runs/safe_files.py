"""Files in a folder that others may have touched: read without hanging, written without following links. No torch.

A name may belong to a pipe, a folder, a device or a link; a file may be sparse, torn or nested too deeply. Readers
raise OSError or ValueError for all of that, and nothing else, so that a caller can pass the file over or say what is
wrong.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 64 * 2**20
MAX_LINE_BYTES = 16 * 2**20
MAX_LINES_BYTES = 4 * 2**30
_CHUNK_BYTES = 2**20


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A regular file for reading; opening a pipe would wait for who writes into it."""
    descriptor = _open(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def open_own(path: Path, flags: int) -> int:
    """Descriptor of a file of ours, made unless it is there; never what a link at its name leads to."""
    return _open(path, flags | os.O_CREAT | os.O_NOFOLLOW)


def create(path: Path) -> int:
    """Descriptor of a new file, for writing; whatever has the name already, a link included, is an error."""
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that nobody can foresee."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")


def remove_temporaries(folder: Path) -> None:
    """What killed processes left in a folder that only one process writes into."""
    for leftover in folder.glob(".*.tmp-*"):
        if not leftover.is_dir() or leftover.is_symlink():
            leftover.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: not there, not readable, or not a regular file.
        ValueError: not JSON, larger than any file of ours, or nested too deeply.
    """
    with open_regular(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB")
    return _parse(content, path)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one a line; broken lines, and a file that cannot be read, are left out."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:  # sparse: no run writes so much
                return
            while line := file.readline(MAX_LINE_BYTES):
                try:
                    content = _parse(line, path)
                except ValueError:
                    continue
                if isinstance(content, dict):
                    yield content
    except OSError:
        return


def sha256(path: Path) -> str:
    """Of a regular file's content, in hex digits."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _parse(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def _open(path: Path, flags: int) -> int:
    """A descriptor of a regular file: without O_NONBLOCK a pipe makes `open` itself wait."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, f"{path.name} is a link, which is not followed; delete it", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise OSError(errno.ENXIO, f"{path.name} is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    return descriptor


def read_text(path: Path, last: int = MAX_JSON_BYTES) -> str:
    """A file, or its last bytes; empty where there is no regular file. What is no UTF-8 is replaced."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read(last).decode(errors="replace")
    except OSError:
        return ""


def write_whole(path: Path, text: str) -> None:
    """A whole file, renamed into place; never through a link that somebody put in the way."""
    temporary = temporary_name(path)
    try:
        with open(create(temporary), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Add a line in one write; after half a line of a killed process it begins a new one.

    Raises:
        OSError: the file cannot be written, or is a link or no regular file.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        whole = not size or os.pread(descriptor, 1, size - 1) == b"\n"
        os.write(descriptor, f"{'' if whole else chr(10)}{line}\n".encode())
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
