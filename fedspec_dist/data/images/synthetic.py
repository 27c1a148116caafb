"""Class-structured random images made from the seed: any shape and size, no files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedspec_dist.core.seeding import generator
from fedspec_dist.data.images.arrays import Arrays

_GRID = 4  # patterns are random values on a 4x4 torus, interpolated to the image
_PATTERNS_PER_CLASS = 2
_SIGNAL_ENERGY = 1100.0  # of a pattern over the whole image, where a pixel's noise has 1: a third of it at 3x32x32
_CHUNK = 1024  # images made at a time, so that no temporary is as large as the data set


class Synthetic:
    """Each image is a smooth pattern of its class, shifted at random, plus white noise; deviation 1 overall.

    The shift (around the edges) keeps a linear model from learning more than a little of it.

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
        shape: Sequence[int],
        num_classes: int,
        num_train: int,
        num_test: int,
    ) -> None:
        self.seed, self.shape, self.num_classes = seed, tuple(shape), num_classes
        self.num_train, self.num_test = num_train, num_test

    def fingerprint(self) -> str:
        return f"synthetic 1 {self.seed} {self.shape} {self.num_classes} {self.num_train} {self.num_test}"

    def load(self) -> Arrays:
        rng = generator(self.seed, "synthetic/patterns")
        patterns = smooth_patterns(rng, self.num_classes * _PATTERNS_PER_CLASS, self.shape)
        train = self._split(patterns, self.num_train, "synthetic/train")
        test = self._split(patterns, self.num_test, "synthetic/test")
        channels = self.shape[0]
        return Arrays(*train, *test, self.num_classes, mean=(0.0,) * channels, std=(1.0,) * channels)

    def _split(self, patterns: np.ndarray, num: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        rng = generator(self.seed, purpose)
        labels = rng.permutation(np.arange(num, dtype=np.int64) % self.num_classes)
        which = labels * _PATTERNS_PER_CLASS + rng.integers(_PATTERNS_PER_CLASS, size=num)
        images = np.empty((num, *patterns.shape[1:]), np.float32)
        signal = np.float32(np.sqrt(_SIGNAL_ENERGY / patterns[0].size))
        for start in range(0, num, _CHUNK):
            chunk = images[start : start + _CHUNK]
            rng.standard_normal(dtype=np.float32, out=chunk)
            chunk += signal * _shifted(patterns, which[start : start + _CHUNK], rng)
            chunk /= np.sqrt(1 + signal**2)
        return images, labels


def smooth_patterns(rng: np.random.Generator, num: int, shape: tuple[int, ...]) -> np.ndarray:
    """Interpolated random grids, float32 `[num, H, W, C]` for shape `(C, H, W)`: mean 0, deviation 1."""
    channels, height, width = shape
    grid = rng.standard_normal((num, channels, _GRID, _GRID))
    fields = np.moveaxis(_interpolation(height) @ grid @ _interpolation(width).T, 1, -1)
    fields -= fields.mean(axis=(1, 2, 3), keepdims=True)
    fields /= fields.std(axis=(1, 2, 3), keepdims=True) + 1e-12
    return np.ascontiguousarray(fields, dtype=np.float32)


def _interpolation(size: int) -> np.ndarray:
    """Matrix `[size, grid]` of linear interpolation from the points of a circle to `size` points on it."""
    at = np.arange(size) * _GRID / size
    distance = np.abs(at[:, None] - np.arange(_GRID))
    return np.maximum(0, 1 - np.minimum(distance, _GRID - distance))


def _shifted(patterns: np.ndarray, which: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`patterns[which]`, each moved around the edges by random numbers of pixels."""
    _, height, width, channels = patterns.shape
    rows = (np.arange(height) + rng.integers(height, size=(len(which), 1))) % height
    columns = (np.arange(width) + rng.integers(width, size=(len(which), 1))) % width
    pixels = (which[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]
    return patterns.reshape(-1, channels)[pixels]
