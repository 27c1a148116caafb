"""Small files of text in a folder that others may have touched: read without hanging, written whole or line by line."""

from __future__ import annotations

import os
from pathlib import Path

from fedspec_dist.runs.safe_files import MAX_JSON_BYTES, create, open_own, open_regular, temporary_name


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
