"""Any image data set in one .npz file with MedMNIST's keys.

J. Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D biomedical image classification",
Scientific Data 10:41, 2023: train_images, train_labels, test_images, test_labels (and val_*, which are not used).
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import files
from .arrays import Arrays, channel_statistics

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_MAX_CHANNELS = 4


class Npz:
    """Images `[n, H, W]` (grey) or `[n, H, W, C]`, uint8 or floating point; labels `[n]` or `[n, 1]`, integers.

    Floating-point images are taken as they are, uint8 ones divided by 255; both are then normalised with mean
    and deviation of the training images.

    Args:
        path: the file; a relative path is looked for here and in `root`.
        num_classes: the largest training label + 1 when not given.
    """

    embedded: ClassVar[bool] = False

    def __init__(
        self, root: Path, download: bool, seed: int, *, path: str | Path, num_classes: int | None = None
    ) -> None:
        given = Path(path).expanduser()
        self.places = [given] if given.is_absolute() else [given, root / given]
        self.given_num_classes = num_classes
        self.command = (
            f"curl -L -o {self.places[-1]} https://zenodo.org/records/10519652/files/{given.name} "
            "(where MedMNIST's files are)"
        )

    @property
    def num_classes(self) -> int:
        return self.given_num_classes or self.load().num_classes

    def fingerprint(self) -> str:
        """Raises DatasetNotFoundError while the file is nowhere."""
        path = self._locate()
        return f"npz 1 {self.given_num_classes} {path.resolve().parent} " + files.stamp([path])

    def load(self) -> Arrays:
        path = self._locate()
        try:
            stored = _read(path)
            train, test = _images(stored, "train"), _images(stored, "test")
            train_labels, test_labels = _labels(stored, "train"), _labels(stored, "test")
        except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
            raise files.unreadable("npz", path, str(error), self.command) from error
        mean, std = channel_statistics(train)
        num_classes = self.given_num_classes or int(train_labels.max(initial=0)) + 1
        return Arrays(train, train_labels, test, test_labels, num_classes, mean, std)

    def _locate(self) -> Path:
        for path in self.places:
            if path.is_file():
                return path
        raise files.not_found("npz", self.places, self.command)


def _read(path: Path) -> dict[str, np.ndarray]:
    file = np.load(path, allow_pickle=False)
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise ValueError("it is a single array, not an .npz file")
    with file:
        missing = [key for key in _KEYS if key not in file]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}; there are: {', '.join(file.files)}")
        return {key: file[key] for key in _KEYS}


def _images(stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    images = stored[f"{split}_images"]
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or not 1 <= images.shape[3] <= _MAX_CHANNELS:
        raise ValueError(
            f"{split}_images has shape {stored[f'{split}_images'].shape}; "
            f"allowed: [n, H, W] or [n, H, W, C] with C up to {_MAX_CHANNELS}"
        )
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"{split}_images has type {images.dtype}; allowed: uint8 or floating point")
    return images.astype(np.float32, copy=False)


def _labels(stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    labels = stored[f"{split}_labels"]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{split}_labels has shape {labels.shape} and type {labels.dtype}; "
            "allowed: integers, [n] or [n, 1] (several labels a sample are not supported)"
        )
    return labels.astype(np.int64)
