"""Images in folders named after their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedspec_dist.data.images.arrays import channel_statistics
from fedspec_dist.data.own_files import OwnFiles, digest_of
from fedspec_dist.data.raw import RawData, Split

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


class Folder(OwnFiles):
    """`path/train/CLASS/*` and `path/test/CLASS/*`, or `path/CLASS/*`, which `test_fraction` and the seed split.

    Classes are numbered in the order of their names. Pixels are normalised with those of the training images.

    Args:
        path: the folder.
        size: `[height, width]` to which images are brought, by bilinear resampling; needed if they differ.
        channels: 3, or 1 for grey.
    """

    name = "folder"

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str,
        size: list[int] | None,
        channels: int,
        test_fraction: float,
    ) -> None:
        super().__init__(root, download, seed)
        self._path, self._size, self._channels, self._test_fraction = path, size, channels, test_fraction

    def fingerprint(self) -> str:
        train, test, classes = self._files()
        names = [path.parent.name for path in (*train, *test)]
        return digest_of(("folder 2", self._size, self._channels, classes, names, len(train)), [*train, *test])

    def load(self) -> RawData:
        train, test, classes = self._files()
        numbers = {name: number for number, name in enumerate(classes)}
        splits = []
        for paths in (train, test):
            labels = np.array([numbers[path.parent.name] for path in paths], dtype=np.int64)
            splits.append(Split((self._images(paths),), labels, labels))
        count = max(len(classes), 2)
        return RawData(
            splits[0],
            splits[1],
            count,
            count,
            pixels=channel_statistics(splits[0].inputs[0]),
            facts={"classes": classes},
        )

    def _files(self) -> tuple[list[Path], list[Path], list[str]]:
        """Training and test images, in order of their names, and the classes."""
        folder = self.locate(self._path, folder=True)
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            train, test = _images_in(folder / "train"), _images_in(folder / "test")
        else:
            everything = _images_in(folder)
            places = self.split(len(everything), self._test_fraction)
            train, test = ([everything[place] for place in part] for part in places)
        classes = sorted({path.parent.name for path in train})
        if other := next((path for path in test if path.parent.name not in classes), None):
            raise ValueError(f"data.path: {other} is of a class that no training image has")
        return train, test, classes

    def _images(self, paths: list[Path]) -> np.ndarray:
        """`[n, H, W, channels]` uint8."""
        from PIL import Image

        images = []
        for path in paths:
            try:
                with Image.open(path) as opened:
                    if opened.mode.startswith(("I", "F")):
                        raise ValueError("it has more than 8 bits a channel, which would be cut off; store 8")
                    image = opened.convert("L" if self._channels == 1 else "RGB")
                    if self._size is not None:
                        image = image.resize((self._size[1], self._size[0]), Image.Resampling.BILINEAR)
                    images.append(np.asarray(image).reshape(image.height, image.width, self._channels))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise ValueError(
                    f"data.path: {path} cannot be read as an image: {error}; mend it or leave it out"
                ) from error
            if images[-1].shape != images[0].shape:
                raise ValueError(
                    f"data.size: {path} has {images[-1].shape[0]}x{images[-1].shape[1]} pixels but {paths[0]} has "
                    f"{images[0].shape[0]}x{images[0].shape[1]}; give the size to which all are brought, such as "
                    "[32, 32]"
                )
        return np.stack(images)


def _images_in(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.glob("*/*") if p.suffix.lower() in _SUFFIXES and not p.is_dir())
    if gone := next((path for path in found if not path.exists()), None):
        raise ValueError(f"data.path: {gone} is a link to nothing; mend it or leave it out")
    if not found:
        raise ValueError(
            f"data.path: {folder} has no images in folders named after their classes; allowed are "
            f"{', '.join(_SUFFIXES)} files in CLASS folders, or those in train and test"
        )
    return found
