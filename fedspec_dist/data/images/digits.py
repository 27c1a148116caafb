"""Handwritten digits, embedded: the data set that needs no download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998, doi 10.24432/C50P49, licence CC BY 4.0. The file holds the 1,797 images of its test part
(writers disjoint from its training part), 8x8 pixels with values 0..16, as uint8. Changed: split once into
1,437 training images and 360 test images, 36 of each digit drawn without replacement with
`numpy.random.default_rng(0)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from fedspec_dist.data.images.arrays import Arrays, channel_statistics

_FILE = Path(__file__).with_name("digits.npz")


class Digits:
    """8x8 grey images of 10 classes, 1,437 for training, 360 for testing. No parameters."""

    embedded: ClassVar[bool] = True
    download: ClassVar[bool] = False
    num_classes = 10

    def __init__(self, root: Path, download: bool, seed: int) -> None:
        pass

    def fingerprint(self) -> str:
        return "digits 1"

    def load(self) -> Arrays:
        with np.load(_FILE, allow_pickle=False) as file:
            stored = dict(file)
        train, test = (np.float32(stored[f"{split}_images"]) / np.float32(16) for split in ("train", "test"))
        mean, std = channel_statistics(train)
        return Arrays(
            train_images=train,
            train_labels=stored["train_labels"].astype(np.int64),
            test_images=test,
            test_labels=stored["test_labels"].astype(np.int64),
            num_classes=self.num_classes,
            mean=mean,
            std=std,
        )
