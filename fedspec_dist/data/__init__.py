"""Data sets, their partition over clients, and batches as tensors that stay on the device.

Layer L1: may import `fedspec_dist.seeding` and its own modules, nothing else of the package.
To add a data set: one file with a class like `digits.Digits`, one line in `SOURCES`.
"""

from __future__ import annotations

from typing import Any

from .cifar import Cifar10, Cifar100
from .digits import Digits
from .fashion_mnist import FashionMnist
from .npz import Npz
from .synthetic import Synthetic

# Each is built as Source(root, download, seed, **its own parameters).
SOURCES: dict[str, type[Any]] = {
    "digits": Digits,
    "fashion_mnist": FashionMnist,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "npz": Npz,
    "synthetic": Synthetic,
}
