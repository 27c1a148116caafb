"""Any image data set in one .npz file with MedMNIST's keys.

J. Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D biomedical image
classification", Scientific Data 10:41, 2023: train_images, train_labels, test_images, test_labels (and val_*,
which are not used). Of our own is train_clients, an id for each training sample, which partition natural reads.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import files
from .arrays import Arrays, channel_statistics

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_CLIENTS = "train_clients"
_MAX_CHANNELS = 4


class Npz:
    """Images `[n, H, W]` or `[n, H, W, C]`, uint8 or floating point; labels `[n]` or `[n, 1]`, integers.

    Client ids, if any, are integers or strings of fixed width, `[n]` or `[n, 1]`; they are numbered in their order.

    Floating-point images are taken as they are, uint8 ones divided by 255; both are then normalised with mean
    and deviation of the training images.

    Args:
        path: the file; a relative path is looked for here and in `root`.
        num_classes: the largest training label + 1 when not given.
    """

    embedded: ClassVar[bool] = False
    download: ClassVar[bool] = False  # nobody but the user knows where the file comes from

    def __init__(
        self, root: Path, download: bool, seed: int, *, path: str | Path, num_classes: int | None = None
    ) -> None:
        given = Path(path).expanduser()
        self.places = [given] if given.is_absolute() else [given, root.expanduser() / given]
        self.given_num_classes = num_classes
        self.command = (
            f"curl -L -o {self.places[-1]} https://zenodo.org/records/10519652/files/{given.name} "
            "(where MedMNIST's files are)"
            if "mnist" in given.name
            else f"cp YOUR/{given.name} {self.places[-1]}, or give the file's full path as data.path"
        )

    @property
    def num_classes(self) -> int:
        """Reads the training labels unless it was given; `Arrays.num_classes` has it too."""
        if self.given_num_classes is not None:
            return self.given_num_classes
        path = self._locate()
        return _count_classes(_labels(path, self._read(path, ["train_labels"]), "train"))

    def fingerprint(self) -> str:
        """Raises DatasetNotFoundError while the file is nowhere."""
        return f"npz 3 {self.given_num_classes} {files.digest(self._locate())}"

    def load(self) -> Arrays:
        path = self._locate()
        stored = self._read(path, _KEYS, optional=[_CLIENTS])
        train, test = _images(path, stored, "train"), _images(path, stored, "test")
        train_labels, test_labels = _labels(path, stored, "train"), _labels(path, stored, "test")
        mean, std = channel_statistics(train)
        num_classes = self.given_num_classes or _count_classes(train_labels)
        clients = _client_ids(path, stored[_CLIENTS]) if _CLIENTS in stored else None
        return Arrays(train, train_labels, test, test_labels, num_classes, mean, std, clients)

    def _locate(self) -> Path:
        for path in self.places:
            if path.is_file():
                return path
            if path.is_dir():
                raise ValueError(f"data.path: got {path}, which is a folder; give the .npz file in it")
        raise files.not_found("npz", self.places, self.command)

    def _read(self, path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        try:
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array, not an .npz file")
            with file:
                missing = [key for key in keys if key not in file]
                present = [*keys, *(key for key in optional if key in file)]
                stored = {} if missing else {key: file[key] for key in present}
        except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
            raise files.unreadable("npz", path, str(error), self.command) from error
        if missing:
            raise ValueError(
                f"data.path: {path} has no {', '.join(missing)}; it needs {', '.join(_KEYS)} "
                f"and has {', '.join(file.files) or 'nothing'}"
            )
        return stored


def _count_classes(labels: np.ndarray) -> int:
    return int(labels.max(initial=0)) + 1


def _images(path: Path, stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    images = stored[f"{split}_images"]
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or not 1 <= images.shape[3] <= _MAX_CHANNELS:
        raise ValueError(
            f"data.path: {path}: {split}_images has shape {stored[f'{split}_images'].shape}; "
            f"allowed: [n, H, W] or [n, H, W, C] with C up to {_MAX_CHANNELS}"
        )
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"data.path: {path}: {split}_images has type {images.dtype}; allowed: uint8 or floating point")
    return images.astype(np.float32, copy=False)


def _client_ids(path: Path, ids: np.ndarray) -> np.ndarray:
    """The number of each sample's id among the sorted ids, int64 `[n]`."""
    flat = _column(ids)
    if flat.ndim != 1 or ids.dtype.kind not in "iuSU":
        raise ValueError(
            f"data.path: {path}: {_CLIENTS} has shape {ids.shape} and type {ids.dtype}; "
            "allowed: integers or strings, [n] or [n, 1]"
        )
    return np.unique(flat, return_inverse=True)[1].astype(np.int64)


def _column(values: np.ndarray) -> np.ndarray:
    """`[n, 1]` as `[n]`, everything else as it is."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _labels(path: Path, stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    labels = _column(stored[f"{split}_labels"])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"data.path: {path}: {split}_labels has shape {labels.shape} and type {labels.dtype}; "
            "allowed: integers, [n] or [n, 1] (several labels a sample are not supported)"
        )
    return labels.astype(np.int64)
