"""A data set as its source gives it: numpy arrays, not yet normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspec_dist.data.raw import RawData, Split, first_not_finite

MAX_CLASSES = 1_000_000
# Between the splits, an image's usual deviation may differ by so much. Pixels of 0..1 and of 0..255 differ by 255.
_MAX_SCALES = 30.0


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

    @classmethod
    def of(
        cls, train: tuple[Any, Any], test: tuple[Any, Any], num_classes: int | None = None, clients: Any = None
    ) -> Arrays:
        """From pairs of images and labels: arrays or lists of any integer or floating-point type.

        Grey images may be `[n, H, W]`. What is not given follows from the training samples: `num_classes` is their
        largest label + 1, mean and deviation are theirs. Nothing is checked yet.
        """
        train_images, test_images = (_as_images(images) for images, _ in (train, test))
        train_labels, test_labels = (_as_integers(labels) for _, labels in (train, test))
        known = train_labels.dtype == np.int64 and len(train_labels) > 0
        sound = train_images.ndim == 4 and train_images.size > 0
        return cls(
            train_images,
            train_labels,
            test_images,
            test_labels,
            num_classes or (int(train_labels.max()) + 1 if known else 1),
            *(channel_statistics(train_images) if sound else ((0.0,), (1.0,))),
            None if clients is None else _as_integers(clients),
        )

    def raw(self) -> RawData:
        """The same as any data: images are the input, labels the targets and the groups."""
        return RawData(
            Split((self.train_images,), self.train_labels, self.train_labels, self.train_clients),
            Split((self.test_images,), self.test_labels, self.test_labels),
            self.num_classes,
            self.num_classes,
            pixels=(self.mean, self.std),
        )

    def check(self, name: str) -> None:
        """Raises ValueError, naming the first offending index, unless the arrays are sound."""
        if not 1 <= self.num_classes <= MAX_CLASSES:
            raise ValueError(f"data.dataset: {name}: num_classes is {self.num_classes}; allowed is 1 to {MAX_CLASSES}")
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
        channels = self.train_images.shape[3]
        if not len(self.mean) == len(self.std) == channels or not all(0 < value < math.inf for value in self.std):
            raise ValueError(
                f"data.dataset: {name}: mean {self.mean} and std {self.std} given; allowed are one number for each of "
                f"the {channels} channels, those of std above 0"
            )
        _check_scales(name, self.train_images, self.test_images)


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


def _as_images(images: Any) -> np.ndarray:
    images = np.asarray(images)
    if images.ndim == 3:
        images = images[..., None]
    return images.astype(np.float32) if np.issubdtype(images.dtype, np.floating) else images


def _as_integers(values: Any) -> np.ndarray:
    values = np.asarray(values)
    return values.astype(np.int64) if np.issubdtype(values.dtype, np.integer) else values


def _shape(array: np.ndarray) -> str:
    return f"shape [{', '.join(map(str, array.shape))}]"


def _check_array(what: str, array: Any, shape: str, num_axes: int, types: Sequence[type]) -> None:
    allowed = f"numpy arrays {shape} of {' or '.join(np.dtype(kind).name for kind in types)}"
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{what} are a {type(array).__name__}; allowed are {allowed} (Arrays.of makes them)")
    if array.ndim != num_axes or array.dtype not in types:
        raise ValueError(
            f"{what} have {_shape(array)} and type {array.dtype}; allowed are {allowed} (Arrays.of makes them)"
        )


def _check_scales(name: str, train: np.ndarray, test: np.ndarray) -> None:
    """Raises ValueError where the pixels of the two splits cannot be of one scale."""
    (low, high, spread), (test_low, test_high, test_spread) = _scale(train), _scale(test)
    apart = spread > 0 < test_spread and not 1 / _MAX_SCALES < spread / test_spread < _MAX_SCALES
    if train.dtype != test.dtype:  # bytes become 0..1
        floats = (test_low, test_high) if train.dtype == np.uint8 else (low, high)
        apart = apart or floats[0] < 0 or floats[1] > 1
    if apart:
        units = [f"{images.dtype}{', divided by 255' if images.dtype == np.uint8 else ''}" for images in (train, test)]
        raise ValueError(
            f"data.dataset: {name}: train images range from {low:g} to {high:g} ({units[0]}), but test images from "
            f"{test_low:g} to {test_high:g} ({units[1]}); both must be in the same units: store both in one way"
        )


def _scale(images: np.ndarray) -> tuple[float, float, float]:
    """The smallest and largest value, and the usual deviation within an image, uint8 ones scaled to 0..1."""
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    sample = images[:: -(-len(images) // 1000)]
    deviations = sample.reshape(len(sample), -1).astype(np.float64).std(axis=1)
    return float(images.min()) / scale, float(images.max()) / scale, float(np.median(deviations)) / scale


def _check_shapes(where: str, images: np.ndarray, labels: np.ndarray) -> None:
    _check_array(f"{where} images", images, "[n, height, width, channels], each at least 1", 4, (np.uint8, np.float32))
    _check_array(f"{where} labels", labels, "[n]", 1, (np.int64,))
    if 0 in images.shape[1:]:
        raise ValueError(f"{where} images are of {_shape(images)}; allowed are a height, width and channels from 1")
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
    _check_array(f"{where} client ids", clients, "[n]", 1, (np.int64,))
    if len(clients) != num_samples:
        raise ValueError(f"{where} has {num_samples} images but {len(clients)} client ids; they must be as many")


def _check_finite(where: str, images: np.ndarray) -> None:
    if (index := first_not_finite(images)) is not None:
        raise ValueError(f"{where} image at index {index} has a value that is not finite (nan or inf)")
