"""Make a data set with images of half the side, each pixel the mean of four. For studies on a few CPU cores.

    python -m benchmarks.shrink cifar10 --root ~/.cache/fedspec_dist          # cifar10_16px.npz
    python -m benchmarks.shrink fashion_mnist --root ~/.cache/fedspec_dist    # fashion_mnist_14px.npz

reads the official files as the package does (and downloads them if it may), and writes its own into the same folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedspec_dist.data.images.cifar import Cifar10
from fedspec_dist.data.images.fashion_mnist import FashionMnist

_SOURCES: dict[str, type[Cifar10] | type[FashionMnist]] = {"cifar10": Cifar10, "fashion_mnist": FashionMnist}


def shrink(images: np.ndarray) -> np.ndarray:
    """uint8 `[n, 2h, 2w, C] -> [n, h, w, C]`, rounded means of 2x2 pixels."""
    num, height, width, channels = images.shape
    blocks = images.reshape(num, height // 2, 2, width // 2, 2, channels).astype(np.uint16)
    return ((blocks.sum(axis=(2, 4)) + 2) // 4).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=sorted(_SOURCES))
    parser.add_argument("--root", type=Path, default=Path("~/.cache/fedspec_dist"))
    options = parser.parse_args()
    root = options.root.expanduser()
    arrays = _SOURCES[options.dataset](root, True, 0).load()
    test_images = shrink(arrays.test_images)
    target = root / f"{options.dataset}_{test_images.shape[1]}px.npz"
    np.savez(
        target,
        train_images=shrink(arrays.train_images),
        train_labels=arrays.train_labels,
        test_images=test_images,
        test_labels=arrays.test_labels,
    )
    print(target)


if __name__ == "__main__":
    main()
