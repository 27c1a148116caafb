"""What a data set's class may leave out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.raw import RawData, Split


class Source:
    """Where a data set comes from. One of a user's own defines `load`, and what else it wants otherwise.

    `root` is the folder `data.root`, `seed` the run's. Parameters of its own are further arguments, by name.
    """

    # Every process makes it in memory, by `load`. False: the first of a host does, and writes what all of them then
    # share below `data.root/prepared`; better for large ones.
    embedded: ClassVar[bool] = True
    download: bool = False  # whether `load` may get missing files from the internet

    def __init__(self, root: Path, download: bool, seed: int) -> None:
        self.root, self.seed = root.expanduser(), seed

    def load(self) -> RawData | Arrays:
        """Images and labels, of most things made by `Arrays.of`, or a `RawData` of any arrays."""
        raise NotImplementedError("data.dataset: a class derived from Source defines load(self) -> Arrays or RawData")

    def fingerprint(self) -> str:
        """Names the content: changes when the arrays do. Here it is a digest of all of them, for which they are loaded;
        who has files gives a digest of those, and raises `files.DatasetNotFoundError` while they are not there."""
        return digest(self.load())


def digest(given: RawData | Arrays) -> str:
    """SHA-256 of the content of all arrays, and of what else is said of them."""
    summed = hashlib.sha256()
    for name, value in sorted(_fields(given)):
        content = (
            np.ascontiguousarray(value)
            if isinstance(value, np.ndarray)
            else np.frombuffer(repr(value).encode(), np.uint8)
        )
        summed.update(f"{name} {content.dtype.str} {content.shape};".encode())
        summed.update(content.reshape(-1).view(np.uint8).data)
    return summed.hexdigest()


def _fields(given: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(given).items():
        if isinstance(value, Split):
            yield from _fields(value, f"{name}.")
        elif name == "inputs":
            yield from ((f"{prefix}inputs.{number}", array) for number, array in enumerate(value))
        else:
            yield f"{prefix}{name}", value
