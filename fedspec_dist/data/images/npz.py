"""Any image data set in one .npz file with MedMNIST's keys.

J. Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D biomedical image
classification", Scientific Data 10:41, 2023: train_images, train_labels, test_images, test_labels (and val_*,
which are not used). Of our own is train_clients, an id for each training sample, which partition natural reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedspec_dist.data import files
from fedspec_dist.data.images.arrays import MAX_CLASSES, Arrays, channel_statistics
from fedspec_dist.data.images.npz_file import DamagedError, names_in, read_arrays
from fedspec_dist.data.raw import RawData, Split, numbered

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_CLIENTS = "train_clients"
_MAX_CHANNELS = 4
# Labels with gaps are taken as they are up to so many times as many outputs as classes that occur, and up to so many.
_MAX_GAPS, _SMALL = 10, 1000


class Npz:
    """Images `[n, H, W]` or `[n, H, W, C]`, uint8 or floating point; labels `[n]` or `[n, 1]`, integers.

    Or any arrays: `train_inputs` (or `train_inputs_0`, `train_inputs_1` and so on, which a model takes in this order),
    `train_targets`, `train_groups`, `train_clients`, and the same with `test_`. Those are taken as they are; whole
    targets `[n]` are classes. uint8 inputs stay whole numbers.

    Client ids, if any, are integers or strings of fixed width, `[n]` or `[n, 1]`; they are numbered in their order.

    Floating-point images are taken as they are, uint8 ones divided by 255; both are then normalised with mean
    and deviation of the training images.

    Args:
        path: the file; a relative path is looked for here and in `root`.
        num_classes: the largest training label + 1 when not given.
        renumber: number the labels that the training samples have from 0 on, in ascending order.
    """

    embedded: ClassVar[bool] = False
    download: ClassVar[bool] = False  # nobody but the user knows where the file comes from

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str | Path,
        num_classes: int | None = None,
        renumber: bool = False,
    ) -> None:
        given = Path(path).expanduser()
        self.places = [given] if given.is_absolute() else [given, root.expanduser() / given]
        self.given_num_classes, self.renumber = num_classes, renumber
        self.command = (
            f"curl -L -o {self.places[-1]} https://zenodo.org/records/10519652/files/{given.name} "
            "(where MedMNIST's files are)"
            if "mnist" in given.name
            else f"cp YOUR/{given.name} {self.places[-1]}, or give the file's full path as data.path"
        )
        self._get_again = (
            f"get it again: {self.command}" if "mnist" in given.name else "write it again, or copy it whole"
        )

    def fingerprint(self) -> str:
        """Raises DatasetNotFoundError while the file is nowhere."""
        renumbered = " renumbered" if self.renumber else ""
        return f"npz 3 {self.given_num_classes}{renumbered} {files.digest(self._locate())}"

    def load(self) -> Arrays | RawData:
        path = self._locate()
        if (any_arrays := self._any_arrays(path)) is not None:
            return any_arrays
        stored = self._read(path, _KEYS, optional=[_CLIENTS])
        train, test = _images(path, stored, "train"), _images(path, stored, "test")
        train_labels, test_labels = _labels(path, stored, "train"), _labels(path, stored, "test")
        if empty := [key for key in _KEYS if not len(stored[key])]:
            raise ValueError(
                f"data.path: {path}: {', '.join(empty)} is empty; a data set needs some samples of both kinds"
            )
        mean, std = channel_statistics(train)
        if self.renumber:
            train_labels, test_labels = _renumbered(path, train_labels, test_labels)
        num_classes = self.given_num_classes or _count_classes(path, train_labels, test_labels)
        clients = _client_ids(path, stored[_CLIENTS]) if _CLIENTS in stored else None
        return Arrays(train, train_labels, test, test_labels, num_classes, mean, std, clients)

    def _any_arrays(self, path: Path) -> RawData | None:
        """Of a file with `train_inputs` or `train_inputs_0`, `_1` and so on, in place of `train_images`."""
        try:
            present = names_in(path)
        except (OSError, DamagedError):
            return None  # whoever reads the images says so
        named = [name for name in present if name.startswith(("train_", "test_"))]
        if "train_images" in named or not any(name.startswith("train_inputs") for name in named):
            return None
        stored = self._read(path, named)
        inputs = [_numbered_inputs(path, stored, split) for split in ("train", "test")]
        given = {
            (s, part): stored.get(f"{s}_{part}") for s in ("train", "test") for part in ("targets", "groups", "clients")
        }
        targets = [_as_known(f"{s}_targets", given[s, "targets"]) for s in ("train", "test")]
        classes = targets[0] is not None and targets[0].ndim == 1 and targets[0].dtype == np.int64
        groups = [_as_known(f"{s}_groups", given[s, "groups"]) for s in ("train", "test")]
        if groups[0] is None and classes:
            groups = targets
        clients: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if (ids := given["train", "clients"]) is not None:
            clients = numbered(
                _column(ids), None if given["test", "clients"] is None else _column(given["test", "clients"])
            )
        splits = [Split(inputs[n], targets[n], groups[n], clients[n]) for n in range(2)]
        num_groups = 0 if groups[0] is None else max(int(g.max()) for g in groups if g is not None) + 1
        return RawData(splits[0], splits[1], self._num_outputs(targets), max(num_groups, self.given_num_classes or 0))

    def _num_outputs(self, targets: Sequence[np.ndarray | None]) -> int:
        """Classes or words of whole targets, values of a real one."""
        known = [part for part in targets if part is not None]
        if self.given_num_classes is not None and known and known[0].dtype != np.int64:
            raise ValueError(
                f"data.num_classes: got {self.given_num_classes}, but the targets are real numbers; allowed with "
                f"them: null"
            )
        if self.given_num_classes is not None or not known:
            return self.given_num_classes or 1
        if known[0].dtype == np.int64:
            return max(2, *(int(part.max(initial=0)) + 1 for part in known))
        return int(np.prod(known[0].shape[1:], dtype=int))

    def _locate(self) -> Path:
        for path in self.places:
            if path.is_file():
                return path
            if path.is_dir():
                raise ValueError(f"data.path: got {path}, which is a folder; give the .npz file in it")
        raise files.not_found("npz", self.places, self.command)

    def _read(self, path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        try:
            present = names_in(path)
            if not (missing := [key for key in keys if key not in present]):
                return read_arrays(path, [*keys, *(key for key in optional if key in present)])
        except (OSError, DamagedError) as error:
            raise ValueError(
                f"data.path: cannot read {path}: {error}. Is it whole? If not, {self._get_again}"
            ) from error
        except ValueError as error:
            raise ValueError(f"data.path: cannot read {path}: {error}") from error
        raise ValueError(
            f"data.path: {path} has no {', '.join(missing)}; it needs {', '.join(_KEYS)} and has "
            f"{', '.join(present[:20]) or 'nothing'}"
        )


def _numbered_inputs(path: Path, stored: dict[str, np.ndarray], split: str) -> tuple[np.ndarray, ...]:
    names = [f"{split}_inputs"] if f"{split}_inputs" in stored else []
    while not names or names[0] != f"{split}_inputs":
        if (name := f"{split}_inputs_{len(names)}") not in stored:
            break
        names.append(name)
    if not names:
        raise ValueError(f"data.path: {path} has train_inputs but no {split}_inputs; both splits need them")
    return tuple(np.asarray(_as_known(name, stored[name])) for name in names)


def _as_known(name: str, array: np.ndarray | None) -> np.ndarray | None:
    """Whole numbers as int64 and real ones as they are, half precision as float32; bytes stay bytes in inputs."""
    if array is None or array.dtype in (np.bool_, np.float32, np.float64, np.int64):
        return array
    if array.dtype == np.uint8 and "inputs" in name:
        return array
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64)
    if array.dtype == np.float16:
        return array.astype(np.float32)
    raise ValueError(f"data.path: {name} has type {array.dtype}; allowed are whole and real numbers")


def _count_classes(path: Path, train: np.ndarray, test: np.ndarray) -> int:
    """The largest training label + 1.

    Raises:
        ValueError: that is far more than classes occur, or a test label is larger still.
    """
    occurring = len(np.unique(train))
    largest = int(train.max())
    if largest >= max(_SMALL, _MAX_GAPS * occurring) or largest >= MAX_CLASSES:
        raise ValueError(
            f"data.path: {path}: train_labels has {occurring} classes, numbered {train.min()} to {largest}, which "
            f"would make {largest + 1} outputs; number them 0 to {occurring - 1} with data.renumber=true"
            + (f", or ask for the outputs with data.num_classes={largest + 1}" if largest < MAX_CLASSES else "")
        )
    if len(test) and int(test.max()) > largest >= 0:
        index = int(test.argmax())
        raise ValueError(
            f"data.path: {path}: test_labels has label {test[index]} at index {index}, beyond the largest training "
            f"label {largest}; give data.num_classes={int(test[index]) + 1} if no training sample has it, or mend the "
            "labels"
        )
    return max(largest, 0) + 1  # a negative one is refused with all labels that are out of range


def _renumbered(path: Path, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with the places of their labels among those of `train`."""
    known, numbers = np.unique(train, return_inverse=True)
    places = np.searchsorted(known, test).clip(max=len(known) - 1)
    unknown = np.flatnonzero(known[places] != test)
    if len(unknown):
        index = int(unknown[0])
        raise ValueError(
            f"data.renumber: {path}: test_labels has label {test[index]} at index {index}, which no training sample "
            "has; with renumber the classes are those of the training samples: leave such samples out"
        )
    return numbers.astype(np.int64), places.astype(np.int64)


def _images(path: Path, stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    images = stored[f"{split}_images"]
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or not 1 <= images.shape[3] <= _MAX_CHANNELS:
        raise ValueError(
            f"data.path: {path}: {split}_images has shape {stored[f'{split}_images'].shape}; "
            f"allowed: [n, H, W] or [n, H, W, C] with C up to {_MAX_CHANNELS}"
        )
    if 0 in images.shape[1:]:
        raise ValueError(
            f"data.path: {path}: {split}_images has shape {images.shape}; allowed: a height and width from 1"
        )
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"data.path: {path}: {split}_images has type {images.dtype}; allowed: uint8 or floating point")
    return images.astype(np.float32, copy=False)


def _client_ids(path: Path, ids: np.ndarray) -> np.ndarray:
    """The number of each sample's id among the sorted ids, int64 `[n]`."""
    flat = _column(ids)
    if flat.ndim != 1 or ids.dtype.kind not in "iuSU":
        raise ValueError(
            f"data.path: {path}: {_CLIENTS} has shape {ids.shape} and type {ids.dtype}; "
            "allowed: integers or strings, [n] or [n, 1]"
        )
    return np.unique(flat, return_inverse=True)[1].astype(np.int64)


def _column(values: np.ndarray) -> np.ndarray:
    """`[n, 1]` as `[n]`, everything else as it is."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _labels(path: Path, stored: dict[str, np.ndarray], split: str) -> np.ndarray:
    labels = _column(stored[f"{split}_labels"])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"data.path: {path}: {split}_labels has shape {labels.shape} and type {labels.dtype}; "
            "allowed: integers, [n] or [n, 1] (several labels a sample are not supported; of whole numbers in another "
            "type, store labels.astype(int))"
        )
    if len(labels) and int(labels.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"data.path: {path}: {split}_labels has a label of {labels.max()}; allowed: below 2^63")
    return labels.astype(np.int64)
