"""What sources share that read files of the user's own: where these are looked for, and what is a part of them."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, ClassVar

import numpy as np

from fedspec_dist.core import seeding
from fedspec_dist.data import files

# What reading a text file, whole or compressed, may raise; json runs out of frames in what is nested too deep.
UNREADABLE = (OSError, UnicodeError, EOFError, zlib.error, csv.Error, RecursionError)


class OwnFiles:
    """A path is looked for in the folder from which the run is started, then in `data.root`."""

    embedded: ClassVar[bool] = False
    download: bool = False  # nobody but the user knows where the files come from
    name: ClassVar[str] = ""

    def __init__(self, root: Path, download: bool, seed: int) -> None:
        self.root, self.seed = root.expanduser(), seed

    def locate(self, path: str | Path, key: str = "data.path", folder: bool = False) -> Path:
        """The file, or the folder.

        Raises:
            DatasetNotFoundError: it is in neither place. ValueError: it is a folder where a file is meant.
        """
        given = Path(path).expanduser()
        places = [given] if given.is_absolute() else [given, self.root / given]
        for place in places:
            if place.is_dir() if folder else place.is_file():
                return place
            if place.exists():
                raise ValueError(f"{key}: {place} is {'a file' if folder else 'a folder'}; give a {_kind(folder)}")
        raise files.DatasetNotFoundError(
            f"{key}: no {_kind(folder)} {path}; looked at: {', '.join(map(str, places))}. Give the path of one that "
            "every host has"
        )

    def split(self, num_samples: int, test_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Positions of training and test samples of one file that has both, in order, by the run's seed.

        Raises:
            ValueError: one of them would be empty.
        """
        num_test = round(test_fraction * num_samples)
        if not 0 < num_test < num_samples:
            raise ValueError(
                f"data.test_fraction: got {test_fraction}, which of {num_samples} samples leaves {num_test} for the "
                "test; allowed: one that leaves some of both"
            )
        order = seeding.generator(self.seed, "test split").permutation(num_samples)
        return np.sort(order[num_test:]), np.sort(order[:num_test])


def _kind(folder: bool) -> str:
    return "folder" if folder else "file"


def open_text(path: Path) -> IO[str]:
    """A text file in UTF-8, also one that is compressed (`.gz`)."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def digest_of(settings: object, paths: Iterable[Path]) -> str:
    """Settings that decide what is read, and the files' content."""
    return f"{settings!r} {files.content(paths)}"
