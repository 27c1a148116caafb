"""Fashion-MNIST from its four IDX files.

H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms", arXiv:1708.07747, 2017. The IDX format is Y. LeCun's: two zero bytes, a type byte (8 = uint8),
the number of dimensions, each dimension as a big-endian uint32, then the values.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedspec_dist.data import files
from fedspec_dist.data.images.arrays import Arrays

_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


class FashionMnist:
    """28x28 grey images of 10 classes of clothing, 60,000 for training, 10,000 for testing. No parameters.

    Looked for in `root`, in `root/FashionMNIST/raw` (torchvision's place) and where Debian's package puts it.
    """

    embedded: ClassVar[bool] = False
    num_classes = 10
    mean = (0.2860,)
    std = (0.3530,)

    def __init__(self, root: Path, download: bool, seed: int) -> None:
        self.root = root = root.expanduser()
        self.download = download
        self.folders = (root, root / "FashionMNIST" / "raw", _DEBIAN_FOLDER)
        self.command = (
            f"python -c \"from torchvision.datasets import FashionMNIST; FashionMNIST('{root}', download=True)\""
        )

    def fingerprint(self) -> str:
        """Raises DatasetNotFoundError while the files are nowhere; never downloads."""
        folder = files.locate("fashion_mnist", self.folders, _NAMES, self.command)
        return "fashion_mnist 2 " + files.content(folder / name for name in _NAMES)

    def load(self) -> Arrays:
        fetch = self._fetch if self.download else None
        folder = files.locate("fashion_mnist", self.folders, _NAMES, self.command, self.root, fetch)
        train_images, train_labels, test_images, test_labels = (self._read(folder / name) for name in _NAMES)
        return Arrays(
            train_images=train_images[..., None],
            train_labels=train_labels.astype(np.int64),
            test_images=test_images[..., None],
            test_labels=test_labels.astype(np.int64),
            num_classes=self.num_classes,
            mean=self.mean,
            std=self.std,
        )

    def _fetch(self, root: Path) -> None:
        from torchvision.datasets import FashionMNIST  # imported here: it takes a second, and few runs download

        FashionMNIST(root, download=True)

    def _read(self, path: Path) -> np.ndarray:
        num_dimensions = 3 if "idx3" in path.name else 1
        try:
            return read_idx(path, num_dimensions)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise files.unreadable("fashion_mnist", path, str(error), self.command) from error


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """The uint8 array of a gzipped IDX file.

    Raises:
        ValueError: not an IDX file of uint8 with that many dimensions, or more or fewer values than it
        announces. OSError, EOFError, zlib.error: not gzip, truncated or corrupt.
    """
    with gzip.open(path, "rb") as file:
        content = file.read()
    header_size = 4 + 4 * num_dimensions
    if content[:4] != bytes([0, 0, 8, num_dimensions]) or len(content) < header_size:
        raise ValueError(f"it is not an IDX file of bytes with {num_dimensions} dimension(s)")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", num_dimensions, offset=4))
    num_values = int(np.prod(shape))
    if len(content) != header_size + num_values:
        raise ValueError(f"it announces {num_values} values but holds {len(content) - header_size}")
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)
