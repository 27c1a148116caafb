"""Any classification data set of torchvision, by the name of its class."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedspec_dist.data import files
from fedspec_dist.data.files import DatasetNotFoundError
from fedspec_dist.data.images.arrays import channel_statistics
from fedspec_dist.data.own_files import OwnFiles
from fedspec_dist.data.raw import RawData, Split

# What the two splits are called, in the order in which they are tried.
_SPLITS = (("train", "test"), ("train", "val"), ("trainval", "test"), ("train-standard", "val"))
# Those with one class an image, of torchvision 0.26; it has no mark for them.
_CLASSIFICATION = (
    "Caltech101", "Caltech256", "CIFAR10", "CIFAR100", "CLEVRClassification", "Country211", "DTD",
    "EMNIST", "EuroSAT", "FashionMNIST", "FER2013", "FGVCAircraft", "Flowers102", "Food101",
    "GTSRB", "ImageNet", "Imagenette", "INaturalist", "KMNIST", "LFWPeople", "MNIST",
    "Omniglot", "OxfordIIITPet", "PCAM", "Places365", "QMNIST", "RenderedSST2", "SEMEION",
    "StanfordCars", "STL10", "SUN397", "SVHN", "USPS",
)  # fmt: skip
_OURS = ("root", "train", "download", "transform", "target_transform", "loader")


class Torchvision(OwnFiles):
    """Images are brought to `size`, which is needed where they differ, and are normalised as all images are.

    Args:
        name: of the class in `torchvision.datasets`, such as `SVHN`, `EuroSAT`, `FGVCAircraft`.
        size: `[height, width]`.
        arguments: further ones of the class, such as `split: letters` of EMNIST.
        test_fraction: of the samples of a data set that has no test split of its own.
    """

    name = "torchvision"

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        name: str,
        size: list[int] | None,
        arguments: dict[str, Any] | None,
        test_fraction: float,
    ) -> None:
        super().__init__(root, download, seed)
        self.download = download
        self._name, self._size, self._arguments = name, size, arguments or {}
        self._test_fraction = test_fraction

    def fingerprint(self) -> str:
        settings = (self._name, self._size, sorted(self._arguments.items()), self._test_fraction, self.seed)
        parts = self._open(download=False)
        return f"torchvision 2 {settings!r} {[_digest(part) for part in parts]}"

    def load(self) -> RawData:
        parts = self._open(self.download)
        found = [self._read(part) for part in parts]
        if len(found) == 1:
            (images, labels), places = found[0], self.split(len(found[0][1]), self._test_fraction)
            found = [(images[p], labels[p]) for p in places]
        splits = [Split((images,), labels, labels) for images, labels in found]
        count = max(int(max(split.targets.max() for split in splits if split.targets is not None)) + 1, 2)
        classes = getattr(parts[0], "classes", None)
        facts = {"classes": [str(name) for name in classes]} if isinstance(classes, (list, tuple)) else {}
        return RawData(splits[0], splits[1], count, count, pixels=channel_statistics(splits[0].inputs[0]), facts=facts)

    def _open(self, download: bool) -> list[Any]:
        """The training and the test part, or the whole where there are no parts."""
        kind = _class_of(self._name)
        # What a class takes and hands on to its parent, as EMNIST does, is in the parent's signature.
        taken = {name for parent in kind.__mro__ for name in inspect.signature(parent.__init__).parameters}
        if wrong := sorted((set(self._arguments) - taken) | (set(self._arguments) & set(_OURS))):
            allowed = sorted(set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs", *_OURS})
            raise ValueError(
                f"data.arguments: got {wrong[0]}; of {self._name} allowed are: {', '.join(allowed) or 'none'}"
            )
        own = {**({"download": download} if "download" in taken else {}), **self._arguments}
        if "train" in taken:
            choices: list[list[dict[str, Any]]] = [[{"train": True}, {"train": False}]]
        elif "split" in taken and "split" not in own:
            choices = [[{"split": left}, {"split": right}] for left, right in _SPLITS]
        else:
            choices = [[{}]]
        failure: Exception | None = None
        for choice in choices:
            try:
                return [kind(root=str(self.root), **own, **part) for part in choice]
            except ValueError as error:  # of a split that this one does not have
                failure = error
            except (TypeError, ImportError) as error:
                key, needed = ("name", "a package") if isinstance(error, ImportError) else ("arguments", "an argument")
                raise ValueError(f"data.{key}: {self._name} of torchvision needs {needed}: {error}") from error
            except (OSError, RuntimeError) as error:
                failure = error
                break
        kind_of_error = ValueError if isinstance(failure, ValueError) else DatasetNotFoundError
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise kind_of_error(
            f"data.name: {self._name} of torchvision cannot be opened in {self.root}: {reason}. Put its files there, "
            "or set data.download: true on a machine with internet access"
        ) from failure

    def _read(self, part: Any) -> tuple[np.ndarray, np.ndarray]:
        images, labels = [], []
        for place in range(len(part)):
            image, label = part[place]
            if isinstance(label, bool) or not isinstance(label, (int, np.integer)):
                raise ValueError(
                    f"data.name: {self._name} has targets of type {type(label).__name__}; allowed are data sets with a "
                    "class for each image"
                )
            if self._size is not None:
                image = image.resize((self._size[1], self._size[0]))
            pixels = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
            images.append(pixels.reshape(image.height, image.width, -1))
            labels.append(int(label))
            if images[-1].shape != images[0].shape:
                raise ValueError(
                    f"data.size: images of {self._name} differ in size or channels ({images[0].shape}, "
                    f"{images[-1].shape}); give the size to which all are brought, such as [32, 32]"
                )
        return np.stack(images), np.array(labels, dtype=np.int64)


def _class_of(name: str) -> Any:
    from torchvision import datasets

    known = [known for known in _CLASSIFICATION if hasattr(datasets, known)]
    if name not in known:
        raise ValueError(f"data.name: got {name!r}; allowed are classification data sets: {', '.join(known)}")
    return getattr(datasets, name)


def _digest(part: Any) -> str:
    """Of all samples: of the arrays where the data set holds them, else of the images' files, else of what it gives.

    Files are read whole but not decoded, once a process.
    """
    summed = hashlib.sha256(repr(len(part)).encode())
    held = [value for _, value in sorted(vars(part).items()) if _is_of_each(value, len(part))]
    if any(isinstance(value, (np.ndarray, Tensor)) and value.ndim > 1 for value in held):
        for value in held:
            summed.update(np.ascontiguousarray(np.asarray(value)).tobytes())
        return summed.hexdigest()
    rows = [[_words(value[place]) for value in held] for place in range(len(part))]
    if rows and all(any(isinstance(word, Path) for words in row for word in words) for row in rows):
        for row in rows:
            for word in (word for words in row for word in words):
                summed.update((files.digest(word) if isinstance(word, Path) else repr(word)).encode())
        return summed.hexdigest()
    for place in range(len(part)):
        image, label = part[place]
        summed.update(np.ascontiguousarray(np.asarray(image)).tobytes() + repr(label).encode())
    return summed.hexdigest()


def _is_of_each(value: Any, count: int) -> bool:
    return isinstance(value, (list, np.ndarray, Tensor)) and len(value) == count


def _words(value: Any) -> list[Any]:
    """A sample's entry, with paths of files told from other words; others are left out, as paths of folders are."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    found = [Path(part) if isinstance(part, (str, Path)) and Path(part).is_file() else part for part in parts]
    return [part for part in found if isinstance(part, (Path, int, np.integer)) and not isinstance(part, bool)]
