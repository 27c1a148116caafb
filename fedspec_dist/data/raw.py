"""A data set as its source gives it: numpy arrays of any shapes, split into training and test samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

INPUT_TYPES = (np.uint8, np.bool_, np.int64, np.float32, np.float64)
TARGET_TYPES = (np.int64, np.float32, np.float64)


@dataclass(frozen=True)
class Split:
    """Samples `0 .. n - 1`. `inputs` are what a model takes, in order, `[n, ...]` each.

    `targets [n, ...]` are int64 (classes, words) or floating (values). `groups [n]`, int64 from 0, are what partitions
    by label cut by and what class counts count: of a classification its targets, of others whatever groups samples.
    `clients [n]`, int64, says whose each sample is, by the same numbers in both splits.
    """

    inputs: tuple[np.ndarray, ...]
    targets: np.ndarray | None = None
    groups: np.ndarray | None = None
    clients: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])


@dataclass(frozen=True)
class RawData:
    """Both splits, and what the samples alone do not say.

    `num_outputs` is what a model puts out for a sample: a score for each class, a number for each value of a target, a
    score for each word. `vocabulary` is the number of different tokens, of inputs that are token numbers `0 ..
    vocabulary - 1`. `pixels` gives mean and standard deviation for each channel where the first input is images
    `[n, H, W, C]`, uint8 (0..255, divided by 255) or float32: they are normalised when the data set is prepared.
    `facts` is written into the run's folder: what somebody needs who has new samples (names of columns and categories,
    means and deviations, a vocabulary's words).
    """

    train: Split
    test: Split
    num_outputs: int
    num_groups: int = 0  # 0: there are no groups
    vocabulary: int | None = None
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    facts: dict[str, Any] | None = None

    def check(self, name: str) -> None:
        """Raises ValueError, naming the first offending index, unless the arrays are sound."""
