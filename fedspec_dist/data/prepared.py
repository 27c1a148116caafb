"""From a source to the tensors that training reads: normalised once a node, then shared by its ranks.

Sources that come from files are normalised by one process of the node, written under a temporary name and
renamed into place; every process then maps the same memory. So a folder is either whole or not there, whoever
is killed when. Folders left by killed processes are removed by the next run, damaged ones are made again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedspec_dist.data.dataset import Dataset
from fedspec_dist.data.files import DatasetNotFoundError, content_digest
from fedspec_dist.data.parts import PARTS, Source, as_dataset, facts_of, in_memory, loaded, normalised, parts_of
from fedspec_dist.data.raw import RawData
from fedspec_dist.data.temporary import remove_leftovers, temporary_name

logger = logging.getLogger(__name__)

_FORMAT = "prepared 3"
_POLL_S = 0.2
_SAY_WHAT_FOR_AFTER_S = 10.0
_CHUNK = 1024


@dataclass(frozen=True)
class _Wanted:
    """A data set with what its prepared folder is named after."""

    name: str
    source: Source
    content: str  # empty: to be found out from the source
    reader: str

    def folder(self, parent: Path) -> Path:
        """Raises DatasetNotFoundError while the content is neither given nor there."""
        content = self.content or content_digest(self.name, self.source)
        key = hashlib.sha256(f"{_FORMAT} {content} {self.reader}".encode())
        return parent / f"{self.name}-{key.hexdigest()[:16]}"


def load(
    name: str, source: Source, root: Path, *, prepares: bool, embedded: bool, content: str = "", reader: str = ""
) -> Dataset:
    """The data set as tensors on the CPU.

    Args:
        name: for the folder and for messages.
        source: what reads it.
        root: the folder is made in `root/prepared`.
        prepares: exactly one process of each node; the others wait for it.
        embedded: make it in memory, in every process, without files.
        content: `content_digest` of the source where it is known, so that a process that waits need not read the files.
        reader: what besides the content decides what is prepared: a digest of the source's own code.

    Raises:
        DatasetNotFoundError: there are no files to read.
        ValueError: the files are unreadable or their labels or pixels are not sound.
        OSError: the prepared form cannot be written; nothing is left behind.
    """
    if embedded:
        return in_memory(name, source)
    parent = root.expanduser() / "prepared"
    wanted = _Wanted(name, source, content, reader)
    return _open(_prepare(wanted, parent) if prepares else _wait(wanted, parent))


# --- the folder: <name>-<16 hex>/{*.npy, meta.json}


def _finished(wanted: _Wanted, parent: Path) -> Path | None:
    """The folder if it is there and whole. Its name may not be known before the source's files are there."""
    try:
        folder = wanted.folder(parent)
    except (DatasetNotFoundError, FileNotFoundError):  # a file may go, or come, between looking and reading
        return None
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    """Whether every file has the size that was written and a header; if one is truncated or missing it is damaged."""
    try:
        sizes = json.loads((folder / "meta.json").read_bytes())["sizes"]
        for part in {*PARTS, *sizes}:
            path = folder / f"{part}.npy"
            if path.stat().st_size != sizes[part]:
                return False
            np.load(path, mmap_mode="r")
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return False
    return True


def _open(folder: Path) -> Dataset:
    meta = json.loads((folder / "meta.json").read_bytes())
    # Mode "c": shared with every process that maps the file, and private should anyone write.
    parts = {part: np.load(folder / f"{part}.npy", mmap_mode="c") for part in meta["sizes"]}
    return as_dataset(parts, meta["facts"])


def _wait(wanted: _Wanted, parent: Path) -> Path:
    """Polls until the preparing process has put the folder in place."""
    started, told = time.monotonic(), False
    while (folder := _finished(wanted, parent)) is None:
        if not wanted.content and not wanted.source.download:
            wanted.source.fingerprint()  # what is missing now stays missing: raises
        if not told and time.monotonic() - started > _SAY_WHAT_FOR_AFTER_S:
            logger.warning("waiting for the first rank of this node to prepare %s in %s", wanted.name, parent)
            told = True
        time.sleep(_POLL_S)
    return folder


def _prepare(wanted: _Wanted, parent: Path) -> Path:
    """The folder, made now unless it is there and whole."""
    remove_leftovers(parent)
    if (folder := _finished(wanted, parent)) is not None:
        return folder
    raw = loaded(wanted.name, wanted.source)
    content = content_digest(wanted.name, wanted.source)
    if wanted.content not in ("", content):
        raise ValueError(
            f"data.dataset: the files of {wanted.name} are not the ones that this run began with: they were changed "
            "meanwhile, or were downloaded and differ from another host's; start again when they are in place"
        )
    folder = replace(wanted, content=content).folder(parent)
    temporary = temporary_name(folder)
    try:
        _write(temporary, raw)
        _install(temporary, folder)
    except OSError as error:
        raise _cannot_write(folder, raw, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(folder: Path, raw: RawData) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this id
    folder.mkdir(parents=True)
    for part, values in parts_of(raw):
        if raw.pixels is not None and part in PARTS:
            _write_images(folder / f"{part}.npy", values, *raw.pixels)
        else:
            np.save(folder / f"{part}.npy", values)
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*.npy")}
    (folder / "meta.json").write_text(json.dumps({"facts": facts_of(raw), "sizes": sizes}))


def _write_images(path: Path, images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """The .npy file of the normalised images, written in chunks: a whole float copy may not fit in memory."""
    header = {"descr": "<f4", "fortran_order": False, "shape": images.shape}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(images), _CHUNK):
            chunk = normalised(images[start : start + _CHUNK], mean, std)
            file.write(np.ascontiguousarray(chunk, "<f4").data)


def _install(temporary: Path, folder: Path) -> None:
    """Renames into place. Who comes second takes the winner's; a damaged folder is moved away."""
    while True:
        try:
            os.rename(temporary, folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _is_whole(folder):
            return
        _discard(folder)


def _discard(folder: Path) -> None:
    """Removes a folder so that nobody sees half of it, and nobody minds if another process was faster."""
    aside = temporary_name(folder.with_name(folder.name + ".damaged"))
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def _cannot_write(folder: Path, raw: RawData, error: OSError) -> OSError:
    needed = sum(4 * array.size for _, array in parts_of(raw))
    return OSError(
        error.errno,
        f"data.root: cannot write the prepared data set {folder} ({error.strerror or error}); "
        f"it takes {needed / 1e6:.0f} MB. Free some space, or set data.root to a folder that has it",
    )
