"""Class-structured random images made from the seed: any shape and size, no files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..seeding import generator
from .arrays import Arrays

_GRID = 4  # patterns are random values on a 4x4 grid, interpolated to the image
_PATTERNS_PER_CLASS = 4  # several, so that a class is not one direction and a linear model falls short
_SIGNAL = 0.35  # deviation of the pattern per unit of noise: at 32x32 learnable, not at first sight
_CHUNK = 1024  # images made at a time, so that no temporary is as large as the data set


class Synthetic:
    """Each image is one of its class's smooth patterns plus white noise, scaled to mean 0 and deviation 1.

    Args:
        shape: channels, height, width.
        num_classes: classes are as frequent as each other.
        num_train: training images.
        num_test: test images.
    """

    embedded: ClassVar[bool] = True
    download: ClassVar[bool] = False

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        num_train: int = 5000,
        num_test: int = 1000,
    ) -> None:
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(
                f"data.shape: {list(shape)} given; allowed is [channels, height, width], each at least 1"
            )
        for key, value in (("num_classes", num_classes), ("num_train", num_train), ("num_test", num_test)):
            if value < 1:
                raise ValueError(f"data.{key}: {value} given; allowed is at least 1")
        self.seed, self.shape, self.num_classes = seed, tuple(shape), num_classes
        self.num_train, self.num_test = num_train, num_test

    def fingerprint(self) -> str:
        return f"synthetic 1 {self.seed} {self.shape} {self.num_classes} {self.num_train} {self.num_test}"

    def load(self) -> Arrays:
        patterns = smooth_patterns(
            generator(self.seed, "synthetic/patterns"), (self.num_classes, _PATTERNS_PER_CLASS), self.shape
        )
        train = self._split(patterns, self.num_train, "synthetic/train")
        test = self._split(patterns, self.num_test, "synthetic/test")
        channels = self.shape[0]
        return Arrays(*train, *test, self.num_classes, mean=(0.0,) * channels, std=(1.0,) * channels)

    def _split(self, patterns: np.ndarray, num: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        rng = generator(self.seed, purpose)
        labels = rng.permutation(np.arange(num, dtype=np.int64) % self.num_classes)
        which = rng.integers(patterns.shape[1], size=num)
        images = np.empty((num, *patterns.shape[2:]), np.float32)
        for start in range(0, num, _CHUNK):
            rows = slice(start, start + _CHUNK)
            rng.standard_normal(dtype=np.float32, out=images[rows])
            images[rows] += np.float32(_SIGNAL) * patterns[labels[rows], which[rows]]
            images[rows] /= np.float32(np.sqrt(1 + _SIGNAL**2))
        return images, labels


def smooth_patterns(rng: np.random.Generator, leading: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Interpolated random grids, float32 `[*leading, H, W, C]` for shape `(C, H, W)`, mean 0, deviation 1."""
    channels, height, width = shape
    grid = rng.standard_normal((*leading, channels, _GRID, _GRID))
    fields = _interpolation(height) @ grid @ _interpolation(width).T
    fields = np.moveaxis(fields, -3, -1)
    image_axes = (-3, -2, -1)
    fields -= fields.mean(axis=image_axes, keepdims=True)
    fields /= fields.std(axis=image_axes, keepdims=True) + 1e-12
    return fields.astype(np.float32)


def _interpolation(size: int) -> np.ndarray:
    """Matrix `[size, grid]` of linear interpolation from the grid's points to `size` points."""
    at = np.linspace(0, _GRID - 1, size)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(_GRID)))
