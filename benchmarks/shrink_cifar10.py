"""Make `cifar10_16px.npz`: CIFAR-10 at 16x16 pixels, each the mean of four. For studies on a few CPU cores.

    python -m benchmarks.shrink_cifar10 --root ~/.cache/fedspec_dist

reads the official batches as the package does (and downloads them if it may), and writes the file into the same folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedspec_dist.data.cifar import Cifar10


def shrink(images: np.ndarray) -> np.ndarray:
    """uint8 `[n, 2h, 2w, C] -> [n, h, w, C]`, rounded means of 2x2 pixels."""
    num, height, width, channels = images.shape
    blocks = images.reshape(num, height // 2, 2, width // 2, 2, channels).astype(np.uint16)
    return ((blocks.sum(axis=(2, 4)) + 2) // 4).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("~/.cache/fedspec_dist"))
    root = parser.parse_args().root.expanduser()
    arrays = Cifar10(root, True, 0).load()
    target = root / "cifar10_16px.npz"
    np.savez(
        target,
        train_images=shrink(arrays.train_images),
        train_labels=arrays.train_labels,
        test_images=shrink(arrays.test_images),
        test_labels=arrays.test_labels,
    )
    print(target)


if __name__ == "__main__":
    main()
