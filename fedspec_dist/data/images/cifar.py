"""CIFAR-10 and CIFAR-100 from the official python batches.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, 2009. The files are
pickles of `{data: uint8 [n, 3072], labels or fine_labels: list of int}`, a row being 1,024 red, 1,024 green
and 1,024 blue values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedspec_dist.data import files
from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.unpickle import load_plain_pickle


class _Cifar:
    """What the two data sets share; the fields below differ."""

    embedded: ClassVar[bool] = False
    name: ClassVar[str]
    torchvision_name: ClassVar[str]
    folder_name: ClassVar[str]
    train_names: ClassVar[tuple[str, ...]]
    test_name: ClassVar[str]
    label_key: ClassVar[str]
    num_classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(self, root: Path, download: bool, seed: int) -> None:
        self.root = root = root.expanduser()
        self.download = download
        self.folder = root / self.folder_name
        self.names = (*self.train_names, self.test_name)
        kind = self.torchvision_name
        self.command = f"python -c \"from torchvision.datasets import {kind}; {kind}('{root}', download=True)\""

    def fingerprint(self) -> str:
        """Raises DatasetNotFoundError while the files are nowhere; never downloads."""
        folder = files.locate(self.name, [self.folder], self.names, self.command)
        return f"{self.name} 2 " + files.content(folder / name for name in self.names)

    def load(self) -> Arrays:
        fetch = self._fetch if self.download else None
        files.locate(self.name, [self.folder], self.names, self.command, self.root, fetch)
        batches = [self._read(self.folder / name) for name in self.train_names]
        test_images, test_labels = self._read(self.folder / self.test_name)
        return Arrays(
            train_images=np.concatenate([images for images, _ in batches]),
            train_labels=np.concatenate([labels for _, labels in batches]),
            test_images=test_images,
            test_labels=test_labels,
            num_classes=self.num_classes,
            mean=self.mean,
            std=self.std,
        )

    def _fetch(self, root: Path) -> None:
        import torchvision  # imported here: it takes a second, and few runs download

        getattr(torchvision.datasets, self.torchvision_name)(root, download=True)

    def _read(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        try:
            return _decode(load_plain_pickle(path), self.label_key)
        except (OSError, ValueError) as error:
            raise files.unreadable(self.name, path, str(error), self.command) from error


def _decode(batch: Any, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 `[n, 32, 32, 3]` and labels int64 `[n]` of one unpickled batch.

    Raises:
        ValueError: the batch has another form.
    """
    if not isinstance(batch, dict):
        raise ValueError(f"it holds a {type(batch).__name__}, not the dictionary of a CIFAR batch")
    # Files written by Python 3 tools have bytes for keys; the official ones, from Python 2, read as text.
    named = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    rows, labels = named.get("data"), named.get(label_key)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
        raise ValueError("its 'data' is not an array of bytes with 3072 columns")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise ValueError(f"its {label_key!r} is not a list of integers")
    images = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, np.array(labels, dtype=np.int64)


class Cifar10(_Cifar):
    """32x32 colour images of 10 classes, 50,000 for training, 10,000 for testing. No parameters.

    Mean and deviation over the training pixels, to the three digits that FL-Simulator and FIPA use.
    """

    name = "cifar10"
    torchvision_name = "CIFAR10"
    folder_name = "cifar-10-batches-py"
    train_names = tuple(f"data_batch_{i}" for i in range(1, 6))
    test_name = "test_batch"
    label_key = "labels"
    num_classes = 10
    mean = (0.491, 0.482, 0.447)
    std = (0.247, 0.243, 0.262)


class Cifar100(_Cifar):
    """32x32 colour images of 100 fine classes, 50,000 for training, 10,000 for testing. No parameters."""

    name = "cifar100"
    torchvision_name = "CIFAR100"
    folder_name = "cifar-100-python"
    train_names = ("train",)
    test_name = "test"
    label_key = "fine_labels"
    num_classes = 100
    mean = (0.5071, 0.4867, 0.4408)
    std = (0.2675, 0.2565, 0.2761)
