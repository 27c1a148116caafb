"""Any image data set in one .npz file with MedMNIST's keys.

J. Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D biomedical image
classification", Scientific Data 10:41, 2023: train_images, train_labels, test_images, test_labels (and val_*,
which are not used). Of our own are train_clients, an id for each training
sample, which partition natural reads, and test_clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedspec_dist.data import files
from fedspec_dist.data.any_arrays import any_arrays, client_numbers, column, count_classes, is_of_any, renumbered
from fedspec_dist.data.images.arrays import Arrays, channel_statistics
from fedspec_dist.data.images.npz_file import DamagedError, names_in, read_arrays
from fedspec_dist.data.raw import RawData

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_CLIENTS = ("train_clients", "test_clients")
_MAX_CHANNELS = 4


class Npz:
    """Images `[n, H, W]` or `[n, H, W, C]`, uint8 or floating point; labels `[n]` or `[n, 1]`, integers.

    Or any arrays: `train_inputs` (or `train_inputs_0`, `train_inputs_1` and so on, which a model takes in this order),
    `train_targets`, `train_groups`, `train_clients`, and the same with `test_` (`data.any_arrays`).

    Client ids, if any, are integers or strings of fixed width, `[n]` or `[n, 1]`; they are numbered in their order.

    Floating-point images are taken as they are, uint8 ones divided by 255; both are then normalised with mean
    and deviation of the training images.

    Args:
        path: the file; a relative path is looked for here and in `root`.
        num_classes: the largest training label + 1 when not given.
        renumber: number the labels that the training samples have from 0 on, in ascending order.
    """

    embedded: ClassVar[bool] = False
    download: ClassVar[bool] = False  # nobody but the user knows where the file comes from

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str | Path,
        num_classes: int | None,
        renumber: bool,
    ) -> None:
        given = Path(path).expanduser()
        self.places = [given] if given.is_absolute() else [given, root.expanduser() / given]
        self.given_num_classes, self.renumber = num_classes, renumber
        self.command = (
            f"curl -L -o {self.places[-1]} https://zenodo.org/records/10519652/files/{given.name} "
            "(where MedMNIST's files are)"
            if "mnist" in given.name
            else f"cp YOUR/{given.name} {self.places[-1]}, or give the file's full path as data.path"
        )
        self._get_again = (
            f"get it again: {self.command}" if "mnist" in given.name else "write it again, or copy it whole"
        )

    def fingerprint(self) -> str:
        """Raises DatasetNotFoundError while the file is nowhere."""
        renumbered = " renumbered" if self.renumber else ""
        return f"npz 3 {self.given_num_classes}{renumbered} {files.digest(self._locate())}"

    def load(self) -> Arrays | RawData:
        path = self._locate()
        if (named := self._names_of_any(path)) is not None:
            return any_arrays(path, self._read(path, named), self.given_num_classes, self.renumber)
        stored = self._read(path, _KEYS, optional=_CLIENTS)
        train, test = _images(path, stored, "train"), _images(path, stored, "test")
        train_labels, test_labels = _labels(path, stored, "train"), _labels(path, stored, "test")
        if empty := [key for key in _KEYS if not len(stored[key])]:
            raise ValueError(
                f"data.path: {path}: {', '.join(empty)} is empty; a data set needs some samples of both kinds"
            )
        mean, std = channel_statistics(train)
        if self.renumber:
            train_labels, test_labels = renumbered(path, "labels", train_labels, test_labels)
        num_classes = self.given_num_classes or count_classes(path, "labels", train_labels, test_labels)
        clients, test_clients = client_numbers(path, stored)
        arrays = Arrays(train, train_labels, test, test_labels, num_classes, mean, std, clients)
        if test_clients is None:
            return arrays
        arrays.check("npz")  # it says more of images than the check of any arrays
        raw = arrays.raw()
        return replace(raw, test=replace(raw.test, clients=test_clients))

    def _names_of_any(self, path: Path) -> list[str] | None:
        """The arrays of a file that has `train_inputs` or `train_inputs_0` in place of `train_images`."""
        try:
            named = [name for name in names_in(path) if name.startswith(("train_", "test_"))]
        except (OSError, DamagedError):
            return None  # whoever reads the images says so
        return named if is_of_any(named) else None

    def _locate(self) -> Path:
        for path in self.places:
            if path.is_file():
                return path
            if path.is_dir():
                raise ValueError(f"data.path: got {path}, which is a folder; give the .npz file in it")
        raise files.not_found("npz", self.places, self.command)

    def _read(self, path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        try:
            present = names_in(path)
            if not (missing := [key for key in keys if key not in present]):
                return read_arrays(path, [*keys, *(key for key in optional if key in present)])
        except (OSError, DamagedError) as error:
            raise ValueError(
                f"data.path: cannot read {path}: {error}. Is it whole? If not, {self._get_again}"
            ) from error
        except ValueError as error:
            raise ValueError(f"data.path: cannot read {path}: {error}") from error
        raise ValueError(
            f"data.path: {path} has no {', '.join(missing)}; it needs {', '.join(_KEYS)} and has "
            f"{', '.join(present[:20]) or 'nothing'}"
        )


def _images(path: Path, stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    images = stored[f"{split}_images"]
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or not 1 <= images.shape[3] <= _MAX_CHANNELS:
        raise ValueError(
            f"data.path: {path}: {split}_images has shape {stored[f'{split}_images'].shape}; "
            f"allowed: [n, H, W] or [n, H, W, C] with C up to {_MAX_CHANNELS}"
        )
    if 0 in images.shape[1:]:
        raise ValueError(
            f"data.path: {path}: {split}_images has shape {images.shape}; allowed: a height and width from 1"
        )
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"data.path: {path}: {split}_images has type {images.dtype}; allowed: uint8 or floating point")
    return images.astype(np.float32, copy=False)


def _labels(path: Path, stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    labels = column(stored[f"{split}_labels"])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"data.path: {path}: {split}_labels has shape {labels.shape} and type {labels.dtype}; "
            "allowed: integers, [n] or [n, 1] (several labels a sample are not supported; of whole numbers in another "
            "type, store labels.astype(int))"
        )
    if len(labels) and int(labels.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"data.path: {path}: {split}_labels has a label of {labels.max()}; allowed: below 2^63")
    return labels.astype(np.int64)
