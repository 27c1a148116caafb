"""A data set as its source gives it: numpy arrays, not yet normalised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arrays:
    """Images and labels, split into train and test.

    Images are `[n, H, W, C]`, either uint8 (0..255, divided by 255 on preparation) or float32 in the units of
    `mean` and `std`. Labels are int64 `[n]` in `0..num_classes - 1`. `mean` and `std` have one value a
    channel. `train_clients`, of data collected by clients, is a number for each training sample's, int64 `[n]`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_clients: np.ndarray | None = None

    def check(self, name: str) -> None:
        """Raises ValueError, naming the first offending index, unless the arrays are sound."""
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            where = f"data.dataset: {name}: {split}"
            _check_shapes(where, images, labels)
            _check_labels(where, labels, self.num_classes)
            _check_finite(where, images)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"data.dataset: {name}: train images are {self.train_images.shape[1:]} "
                f"but test images are {self.test_images.shape[1:]} (height, width, channels); they must agree"
            )
        if self.train_clients is not None:
            _check_clients(f"data.dataset: {name}: train", self.train_clients, len(self.train_labels))
        assert len(self.mean) == len(self.std) == self.train_images.shape[3]
        assert all(value > 0 for value in self.std)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of `images [n, H, W, C]`, uint8 ones scaled to 0..1.

    A constant channel gets the deviation 1, so that normalising it gives zeros. In float64, one image batch
    at a time: a whole float copy of a large set would be eight times its size.
    """
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    total = np.zeros(images.shape[3])
    squares = np.zeros(images.shape[3])
    for start in range(0, len(images), 1024):
        chunk = images[start : start + 1024].astype(np.float64) / scale
        total += chunk.sum(axis=(0, 1, 2))
        squares += np.square(chunk).sum(axis=(0, 1, 2))
    count = np.prod(images.shape[:3])
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    std[std < 1e-6] = 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def _check_shapes(where: str, images: np.ndarray, labels: np.ndarray) -> None:
    assert images.ndim == 4, (where, images.shape)
    assert images.dtype in (np.uint8, np.float32), (where, images.dtype)
    assert labels.ndim == 1, (where, labels.shape)
    assert labels.dtype == np.int64, (where, labels.dtype)
    if len(images) != len(labels):
        raise ValueError(f"{where} has {len(images)} images but {len(labels)} labels; they must be as many")
    if len(images) == 0:
        raise ValueError(f"{where} is empty; a data set needs at least one sample in each split")


def _check_labels(where: str, labels: np.ndarray, num_classes: int) -> None:
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        index = int(outside[0])
        raise ValueError(
            f"{where} label at index {index} is {labels[index]}; allowed is 0..{num_classes - 1} "
            f"({len(outside)} labels are outside)"
        )


def _check_clients(where: str, clients: np.ndarray, num_samples: int) -> None:
    assert clients.ndim == 1, (where, clients.shape)
    assert clients.dtype == np.int64, (where, clients.dtype)
    if len(clients) != num_samples:
        raise ValueError(f"{where} has {num_samples} images but {len(clients)} client ids; they must be as many")


def _check_finite(where: str, images: np.ndarray) -> None:
    if images.dtype == np.uint8:
        return
    for start in range(0, len(images), 1024):
        finite = np.isfinite(images[start : start + 1024]).all(axis=(1, 2, 3))
        if not finite.all():
            index = start + int(np.argmin(finite))
            raise ValueError(f"{where} image at index {index} has a value that is not finite (nan or inf)")
