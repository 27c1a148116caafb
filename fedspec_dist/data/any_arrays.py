"""An .npz file's arrays of any kind, and how its classes and clients are numbered.

`train_inputs`, or `train_inputs_0`, `train_inputs_1` and so on, which a model takes in this order; `train_targets`,
`train_groups`, `train_clients`; and the same with `test_`. They are taken as they are. Whole targets `[n]` or
`[n, 1]` are classes, others of whole numbers are words at each place; a single input `[n, T]` of whole numbers from 0
is tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedspec_dist.data.images.arrays import MAX_CLASSES
from fedspec_dist.data.raw import RawData, Split, numbered

_SPLITS, _PARTS = ("train", "test"), ("targets", "groups", "clients")
# Labels with gaps are taken as they are up to so many times as many outputs as classes that occur, and up to so many.
_MAX_GAPS, _SMALL = 10, 1000


def is_of_any(names: Sequence[str]) -> bool:
    return "train_images" not in names and any(name.startswith("train_inputs") for name in names)


def any_arrays(path: Path, stored: Mapping[str, np.ndarray], num_classes: int | None, renumber: bool) -> RawData:
    """The data set of `stored`, name -> array; `num_classes` and `renumber` are as for images.

    Raises:
        ValueError: a name, a type or what the targets are is not allowed.
    """
    inputs = [_inputs(path, stored, split) for split in _SPLITS]
    _check_names(path, stored, inputs)
    targets = [_targets(path, stored, split) for split in _SPLITS]
    groups = [_group_numbers(path, stored, split) for split in _SPLITS]
    targets, num_outputs, are_classes = _with_outputs(path, targets, num_classes, renumber)
    num_groups = max((int(g.max(initial=-1)) + 1 for g in groups if g is not None), default=0)
    if are_classes and all(part is None for part in groups):
        groups, num_groups = targets, num_outputs
    clients = client_numbers(path, stored)
    splits = [Split(tuple(inputs[n].values()), targets[n], groups[n], clients[n]) for n in range(2)]
    return RawData(splits[0], splits[1], num_outputs, num_groups, _vocabulary(splits))


def _vocabulary(splits: Sequence[Split]) -> int | None:
    """How many tokens there are, where the one input is rows of whole numbers from 0."""
    inputs = [split.inputs[0] for split in splits]
    if any(len(split.inputs) > 1 for split in splits) or any(a.ndim != 2 or a.dtype != np.int64 for a in inputs):
        return None
    return max(int(a.max()) for a in inputs) + 1 if all(a.size and a.min() >= 0 for a in inputs) else None


def _with_outputs(
    path: Path, targets: list[np.ndarray | None], num_classes: int | None, renumber: bool
) -> tuple[list[np.ndarray | None], int, bool]:
    """The targets, renumbered if asked for; how many numbers a model puts out; and whether the targets are classes."""
    known = [part for part in targets if part is not None]
    whole = len(known) > 0 and all(part.dtype == np.int64 for part in known)
    are_classes = whole and len(known) == 2 and all(part.ndim == 1 for part in known)
    if renumber and not are_classes:
        raise ValueError(f"data.renumber: the targets of {path} are no classes (whole numbers, [n]); leave it out")
    if num_classes is not None and known and not whole:
        raise ValueError(
            f"data.num_classes: got {num_classes}, but the targets are real numbers; allowed with them: null"
        )
    if are_classes and all(len(part) for part in known):
        if renumber:
            known = list(renumbered(path, "targets", *known))
        return [*known], max(2, num_classes or count_classes(path, "targets", *known)), True
    if not known or num_classes is not None:
        return targets, num_classes or 1, are_classes
    if whole:
        return targets, max(2, *(int(part.max(initial=0)) + 1 for part in known)), are_classes
    return targets, int(np.prod(known[0].shape[1:], dtype=int)), False


def client_numbers(path: Path, stored: Mapping[str, np.ndarray]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`train_clients` and `test_clients` as numbers of their ids in order, the same in both, int64 `[n]`."""
    ids = {}
    for name in (f"{split}_clients" for split in _SPLITS):
        if name not in stored:
            continue
        ids[name] = column(stored[name])
        if ids[name].ndim != 1 or ids[name].dtype.kind not in "iuSU":
            raise ValueError(
                f"data.path: {path}: {name} has shape {stored[name].shape} and type {stored[name].dtype}; "
                "allowed: integers or strings, [n] or [n, 1]"
            )
    train, test = (ids.get(f"{split}_clients") for split in _SPLITS)
    if train is None:
        if test is not None:
            raise ValueError(f"data.path: {path} has test_clients but no train_clients; both are needed")
        return None, None
    if test is not None and len({"i" if part.dtype.kind in "iu" else part.dtype.kind for part in (train, test)}) > 1:
        raise ValueError(
            f"data.path: {path}: train_clients are of {train.dtype} but test_clients of {test.dtype}; allowed are "
            "integers in both, or strings in both"
        )
    return numbered(train, test)


def column(values: np.ndarray) -> np.ndarray:
    """`[n, 1]` as `[n]`, everything else as it is."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def count_classes(path: Path, what: str, train: np.ndarray, test: np.ndarray) -> int:
    """The largest training label + 1.

    Raises:
        ValueError: that is far more than classes occur, or a test label is larger still.
    """
    occurring = len(np.unique(train))
    largest = int(train.max())
    if largest >= max(_SMALL, _MAX_GAPS * occurring) or largest >= MAX_CLASSES:
        raise ValueError(
            f"data.path: {path}: train_{what} has {occurring} classes, numbered {train.min()} to {largest}, which "
            f"would make {largest + 1} outputs; number them 0 to {occurring - 1} with data.renumber=true"
            + (f", or ask for the outputs with data.num_classes={largest + 1}" if largest < MAX_CLASSES else "")
        )
    if len(test) and int(test.max()) > largest >= 0:
        index = int(test.argmax())
        raise ValueError(
            f"data.path: {path}: test_{what} has label {test[index]} at index {index}, beyond the largest training "
            f"label {largest}; give data.num_classes={int(test[index]) + 1} if no training sample has it, or mend the "
            "file"
        )
    return max(largest, 0) + 1  # a negative one is refused with all labels that are out of range


def renumbered(path: Path, what: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with the places of their labels among those of `train`."""
    known, numbers = np.unique(train, return_inverse=True)
    places = np.searchsorted(known, test).clip(max=len(known) - 1)
    unknown = np.flatnonzero(known[places] != test)
    if len(unknown):
        index = int(unknown[0])
        raise ValueError(
            f"data.renumber: {path}: test_{what} has label {test[index]} at index {index}, which no training sample "
            "has; with renumber the classes are those of the training samples: leave such samples out"
        )
    return numbers.astype(np.int64), places.astype(np.int64)


def _inputs(path: Path, stored: Mapping[str, np.ndarray], split: str) -> dict[str, np.ndarray]:
    """Name -> array of a split's inputs, in the order in which a model takes them."""
    names = [f"{split}_inputs"] if f"{split}_inputs" in stored else []
    while not names or names[0] != f"{split}_inputs":
        if (name := f"{split}_inputs_{len(names)}") not in stored:
            break
        names.append(name)
    if not names:
        other = next(name for name in stored if "_inputs" in name)
        raise ValueError(
            f"data.path: {path} has {other} but no {split}_inputs or {split}_inputs_0; both splits need them"
        )
    return {name: _as_known(path, name, stored[name]) for name in names}


def _check_names(path: Path, stored: Mapping[str, np.ndarray], inputs: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Refuses what would be left unread: a name with a slip in it, an input after a gap."""
    known = {*inputs[0], *inputs[1], *(f"{split}_{part}" for split in _SPLITS for part in _PARTS)}
    if unknown := [name for name in stored if name not in known]:
        raise ValueError(
            f"data.path: {path} has {', '.join(unknown[:20])}, which is not read; allowed are train_inputs, or "
            f"train_inputs_0, _1 and so on without a gap, {', '.join(f'train_{part}' for part in _PARTS)}, and the "
            "same with test_"
        )


def _targets(path: Path, stored: Mapping[str, np.ndarray], split: str) -> np.ndarray | None:
    """A split's targets, int64 for all whole numbers and for yes and no."""
    name = f"{split}_targets"
    if name not in stored:
        return None
    array = _as_known(path, name, stored[name])
    return array if np.issubdtype(array.dtype, np.floating) else column(array.astype(np.int64))


def _group_numbers(path: Path, stored: Mapping[str, np.ndarray], split: str) -> np.ndarray | None:
    name = f"{split}_groups"
    return _as_known(path, name, stored[name]) if name in stored else None


def _as_known(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Whole numbers as int64 and real ones as they are, half precision as float32; bytes stay bytes in inputs."""
    if array.dtype in (np.bool_, np.float32, np.float64, np.int64) or (array.dtype == np.uint8 and "inputs" in name):
        return array
    if np.issubdtype(array.dtype, np.integer):
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"data.path: {path}: {name} has a number of {array.max()}; allowed: below 2^63")
        return array.astype(np.int64)
    if array.dtype == np.float16:
        return array.astype(np.float32)
    raise ValueError(f"data.path: {path}: {name} has type {array.dtype}; allowed are whole and real numbers")
