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
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.data.files import DatasetNotFoundError, content_digest
from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.temporary import remove_leftovers, temporary_name

logger = logging.getLogger(__name__)

_FORMAT = "prepared 2"
_POLL_S = 0.2
_SAY_WHAT_FOR_AFTER_S = 10.0
_CHUNK = 1024
_PARTS = ("train_images", "train_labels", "test_images", "test_labels")
_CLIENTS = "train_clients"  # a part of some


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

    def load(self) -> Arrays: ...


@dataclass(frozen=True)
class Dataset:
    """Normalised tensors. Images are float32 `[n, C, H, W]`, on the CPU a view of memory in the order n, H, W, C."""

    train_images: Tensor
    train_labels: Tensor  # int64 [n]
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    train_clients: Tensor | None = None  # int64 [n]: a number for each sample's client, where the data have clients

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device | str, image_format: torch.memory_format = torch.channels_last) -> Dataset:
        """The same on a device; no copy where it already is. `train_clients`, for partitions only, stay."""
        return replace(
            self,
            train_images=images_to(self.train_images, device, image_format),
            train_labels=self.train_labels.to(device),
            test_images=images_to(self.test_images, device, image_format),
            test_labels=self.test_labels.to(device),
        )

    def hold_out(self, positions: np.ndarray) -> tuple[Dataset, Tensor, Tensor]:
        """The data set without some of its test samples, and those: images `[n, C, H, W]`, labels `[n]`."""
        held = torch.zeros(len(self.test_labels), dtype=torch.bool)
        held[torch.from_numpy(positions)] = True
        images, labels = _base(self.test_images), self.test_labels
        rest = replace(self, test_images=_channels_last(images[~held]), test_labels=labels[~held])
        return rest, _channels_last(images[held]), labels[held]


def images_to(images: Tensor, device: torch.device | str, image_format: torch.memory_format) -> Tensor:
    """`[n, C, H, W]` of a data set on a device, in memory as asked there; no copy where both already are so."""
    return _channels_last(_base(images).to(device)).contiguous(memory_format=image_format)


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


def _loaded(name: str, source: Source) -> Arrays:
    try:
        arrays = source.load()
    except (OSError, NotImplementedError) as error:  # of a user's own; ours say it themselves
        raise ValueError(f"data.dataset: {name} cannot be loaded: {error}") from error
    if not isinstance(arrays, Arrays):
        raise ValueError(
            f"data.dataset: load() of {name} gave a {type(arrays).__name__}; allowed is an "
            "fedspec_dist.data.images.arrays.Arrays, which Arrays.of makes of images and labels"
        )
    arrays.check(name)
    return arrays


def _in_memory(name: str, source: Source) -> Dataset:
    arrays = _loaded(name, source)
    images = {
        f"{split}_images": normalised(getattr(arrays, f"{split}_images"), arrays.mean, arrays.std)
        for split in ("train", "test")
    }
    return _as_dataset(images | _labels_and_clients(arrays), arrays.num_classes)


def _labels_and_clients(arrays: Arrays) -> dict[str, np.ndarray]:
    """Part -> what is kept as it is; the clients only where the data set has them."""
    parts = {"train_labels": arrays.train_labels, "test_labels": arrays.test_labels}
    return parts if arrays.train_clients is None else parts | {_CLIENTS: arrays.train_clients}


def _as_dataset(parts: dict[str, np.ndarray], num_classes: int) -> Dataset:
    # Kernels may treat their first elements apart by alignment: torch's memory starts on a cache line, like the mapped
    # files, numpy's need not.
    tensors = {part: torch.from_numpy(np.ascontiguousarray(array)) for part, array in parts.items()}
    tensors = {part: tensor if tensor.data_ptr() % 64 == 0 else tensor.clone() for part, tensor in tensors.items()}
    return Dataset(
        train_images=_channels_last(tensors["train_images"]),
        train_labels=tensors["train_labels"],
        test_images=_channels_last(tensors["test_images"]),
        test_labels=tensors["test_labels"],
        num_classes=num_classes,
        train_clients=tensors.get(_CLIENTS),
    )


def _channels_last(base: Tensor) -> Tensor:
    """`[n, H, W, C]` in memory order, seen as `[n, C, H, W]`."""
    return base.permute(0, 3, 1, 2)


def _base(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


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
    return _as_dataset(parts, meta["num_classes"])


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
    arrays = _loaded(wanted.name, wanted.source)
    content = content_digest(wanted.name, wanted.source)
    if wanted.content not in ("", content):
        raise ValueError(
            f"data.dataset: the files of {wanted.name} are not the ones that this run began with: they were changed "
            "meanwhile, or were downloaded and differ from another host's; start again when they are in place"
        )
    folder = replace(wanted, content=content).folder(parent)
    temporary = temporary_name(folder)
    try:
        _write(temporary, arrays)
        _install(temporary, folder)
    except OSError as error:
        raise _cannot_write(folder, arrays, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(folder: Path, arrays: Arrays) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this id
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        _write_images(folder / f"{split}_images.npy", getattr(arrays, f"{split}_images"), arrays.mean, arrays.std)
    for part, values in _labels_and_clients(arrays).items():
        np.save(folder / f"{part}.npy", values)
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*.npy")}
    (folder / "meta.json").write_text(json.dumps({"num_classes": arrays.num_classes, "sizes": sizes}))


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


def _cannot_write(folder: Path, arrays: Arrays, error: OSError) -> OSError:
    needed = 4 * (arrays.train_images.size + arrays.test_images.size)
    return OSError(
        error.errno,
        f"data.root: cannot write the prepared data set {folder} ({error.strerror or error}); "
        f"it takes {needed / 1e6:.0f} MB. Free some space, or set data.root to a folder that has it",
    )
