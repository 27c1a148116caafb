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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.data.files import DatasetNotFoundError, content_digest
from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.raw import RawData
from fedspec_dist.data.temporary import remove_leftovers, temporary_name

logger = logging.getLogger(__name__)

_FORMAT = "prepared 3"
_POLL_S = 0.2
_SAY_WHAT_FOR_AFTER_S = 10.0
_CHUNK = 1024
_PARTS = ("train_inputs_0", "test_inputs_0")  # of all data sets


class Source(Protocol):
    """Where a data set comes from."""

    @property
    def embedded(self) -> bool:
        """Whether every process makes it in memory, faster than reading a file."""

    @property
    def download(self) -> bool:
        """Whether `load` may get missing files from the internet."""

    def fingerprint(self) -> str:
        """Names the content: changes when the arrays do, and with nothing else that may differ between hosts, such as
        where files lie. Raises DatasetNotFoundError while the files are not there."""

    def load(self) -> RawData | Arrays: ...


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
        return _in_memory(name, source)
    parent = root.expanduser() / "prepared"
    wanted = _Wanted(name, source, content, reader)
    return _open(_prepare(wanted, parent) if prepares else _wait(wanted, parent))


def normalised(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """`(x - mean) / std` per channel in float32, `x` being `images / 255` for uint8 ones. May not copy."""
    if images.dtype == np.float32 and not any(mean) and all(value == 1 for value in std):
        return images
    result = images.astype(np.float32)
    if images.dtype == np.uint8:
        result /= np.float32(255)
    result -= np.array(mean, np.float32)
    result /= np.array(std, np.float32)
    return result


def _loaded(name: str, source: Source) -> RawData:
    try:
        given = source.load()
    except (OSError, NotImplementedError) as error:  # of a user's own; ours say it themselves
        raise ValueError(f"data.dataset: {name} cannot be loaded: {error}") from error
    if not isinstance(given, (Arrays, RawData)):
        raise ValueError(
            f"data.dataset: load() of {name} gave a {type(given).__name__}; allowed is an "
            "fedspec_dist.data.images.arrays.Arrays, which Arrays.of makes of images and labels, or an "
            "fedspec_dist.data.raw.RawData, of any arrays"
        )
    given.check(name)
    return given.raw() if isinstance(given, Arrays) else given


def _in_memory(name: str, source: Source) -> Dataset:
    raw = _loaded(name, source)
    parts = dict(_parts(raw))
    if raw.pixels is not None:
        parts |= {part: normalised(parts[part], *raw.pixels) for part in _PARTS}
    return _as_dataset(parts, _facts(raw))


def _parts(raw: RawData) -> Iterator[tuple[str, np.ndarray]]:
    """Name of a file -> what is in it, not yet normalised. Groups that are the targets are there once."""
    for name, split in (("train", raw.train), ("test", raw.test)):
        for number, array in enumerate(split.inputs):
            yield f"{name}_inputs_{number}", array
        groups = None if split.groups is split.targets else split.groups
        for part, values in (("targets", split.targets), ("groups", groups), ("clients", split.clients)):
            if values is not None:
                yield f"{name}_{part}", values


def _facts(raw: RawData) -> dict[str, Any]:
    """What is known of the data besides the arrays, as JSON has it."""
    pixels = {} if raw.pixels is None else {"mean": list(raw.pixels[0]), "std": list(raw.pixels[1])}
    return {
        "facts": {**pixels, **(raw.facts or {})},
        "num_outputs": raw.num_outputs,
        "num_groups": raw.num_groups,
        "vocabulary": raw.vocabulary,
        "are_images": raw.pixels is not None,
        "groups_are_targets": raw.train.groups is not None and raw.train.groups is raw.train.targets,
    }


def _as_dataset(parts: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Dataset:
    # Kernels may treat their first elements apart by alignment: torch's memory starts on a cache line, like the mapped
    # files, numpy's need not.
    tensors = {part: torch.from_numpy(np.ascontiguousarray(array)) for part, array in parts.items()}
    tensors = {part: tensor if tensor.data_ptr() % 64 == 0 else tensor.clone() for part, tensor in tensors.items()}

    def examples(split: str) -> Examples:
        names = sorted((part for part in tensors if part.startswith(f"{split}_inputs_")), key=_number)
        inputs = tuple(tensors[name] for name in names)
        if facts["are_images"]:  # n, H, W, C in memory, seen as n, C, H, W
            inputs = tuple(tensor.permute(0, 3, 1, 2) for tensor in inputs)
        targets = tensors.get(f"{split}_targets")
        groups = targets if facts["groups_are_targets"] else tensors.get(f"{split}_groups")
        return Examples(inputs, targets, groups, tensors.get(f"{split}_clients"))

    known = {name: facts[name] for name in ("num_outputs", "num_groups", "vocabulary", "are_images", "facts")}
    return Dataset(examples("train"), examples("test"), **known)


def _number(part: str) -> int:
    return int(part.rpartition("_")[2])


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
        for part in {*_PARTS, *sizes}:
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
    return _as_dataset(parts, meta["facts"])


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
    raw = _loaded(wanted.name, wanted.source)
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
    for part, values in _parts(raw):
        if raw.pixels is not None and part in _PARTS:
            _write_images(folder / f"{part}.npy", values, *raw.pixels)
        else:
            np.save(folder / f"{part}.npy", values)
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*.npy")}
    (folder / "meta.json").write_text(json.dumps({"facts": _facts(raw), "sizes": sizes}))


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
    needed = sum(4 * array.size for _, array in _parts(raw))
    return OSError(
        error.errno,
        f"data.root: cannot write the prepared data set {folder} ({error.strerror or error}); "
        f"it takes {needed / 1e6:.0f} MB. Free some space, or set data.root to a folder that has it",
    )
