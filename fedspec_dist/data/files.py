"""What the sources that read files share: where they look, and what they say when that fails."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedspec_dist.data.downloads import download_into

_CHUNK_BYTES = 2**20


class DatasetNotFoundError(ValueError):
    """A data set is in none of the places looked at; the message names them and the command that gets it."""


def not_found(
    name: str, places: Sequence[Path], command: str, download_failure: str | None = None
) -> DatasetNotFoundError:
    """The error for a missing data set; `download_failure` is why getting it just now did not work."""
    looked = ", ".join(str(place) for place in places)
    tried = f" Downloading it failed: {download_failure}." if download_failure else ""
    return DatasetNotFoundError(
        f"data.dataset: {name} is in none of: {looked}.{tried} Get it with: {command}"
        + (" (on a machine with internet access)" if download_failure else "")
    )


def unreadable(name: str, path: Path, reason: str, command: str) -> ValueError:
    """The error for a file that is there but truncated, foreign or malformed."""
    return ValueError(
        f"data.dataset: {name}: cannot read {path}: {reason}. Delete it and get the data set again: {command}"
    )


def content(paths: Iterable[Path]) -> str:
    """Names and digests of files: changes when their content does, and with nothing else."""
    return ";".join(f"{path.name}:{digest(path)}" for path in paths)


def content_digest(name: str, source: Any) -> str:
    """Of what a data set holds, in 16 hex digits: equal wherever its files lie, and whatever times they carry."""
    return hashlib.sha256(f"{name} {source.fingerprint()}".encode()).hexdigest()[:16]


# A process reads a file once, however often it asks. That the file is still the same is told by the time of its last
# change too (ctime), which is out of the hands of whoever copies or unpacks it.
_known: dict[tuple[int, ...], str] = {}


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if key not in _known:
            summed = hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                summed.update(chunk)
            _known[key] = summed.hexdigest()
    return _known[key]


def first_complete(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first folder that holds all the named files."""
    return next((folder for folder in folders if all((folder / name).is_file() for name in names)), None)


def locate(
    name: str,
    folders: Sequence[Path],
    names: Sequence[str],
    command: str,
    root: Path | None = None,
    download: Callable[[Path], object] | None = None,
) -> Path:
    """The folder with the files, after one download into `root` when they are nowhere yet and `download` is given.

    Raises:
        DatasetNotFoundError: nowhere, or the download failed.
    """
    folder, failure = first_complete(folders, names), None
    if folder is None and download is not None and root is not None:
        try:
            download_into(root, name, lambda: first_complete(folders, names) is not None, download)
        except (OSError, RuntimeError) as error:  # URLError is an OSError; a bad checksum is a RuntimeError
            failure = " ".join(str(error).split()) or type(error).__name__
        folder = first_complete(folders, names)
    if folder is None:
        raise not_found(name, folders, command, failure)
    return folder
