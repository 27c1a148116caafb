"""A data set as its source gives it: numpy arrays of any shapes, split into training and test samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

INPUT_TYPES = ("uint8", "bool", "int64", "float32", "float64")
TARGET_TYPES = ("int64", "float32", "float64")
_CHUNK = 1024


@dataclass(frozen=True)
class Split:
    """Samples `0 .. n - 1`. `inputs` are what a model takes, in order, `[n, ...]` each.

    `targets [n, ...]` are int64 (classes, words) or floating (values). `groups [n]`, int64 from 0, are what partitions
    by label cut by and what class counts count: of a classification its targets, of others whatever groups samples.
    `clients [n]`, int64, says whose each sample is, by the same numbers in both splits.
    """

    inputs: tuple[np.ndarray, ...]
    targets: np.ndarray | None = None
    groups: np.ndarray | None = None
    clients: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])


@dataclass(frozen=True)
class RawData:
    """Both splits, and what the samples alone do not say.

    `num_outputs` is what a model puts out for a sample: a score for each class, a number for each value of a target, a
    score for each word. `vocabulary` is the number of different tokens, of inputs that are token numbers `0 ..
    vocabulary - 1`. `pixels` gives mean and standard deviation for each channel where the first input is images
    `[n, H, W, C]`, uint8 (0..255, divided by 255) or float32: they are normalised when the data set is prepared.
    `facts` is written into the run's folder: what somebody needs who has new samples (names of columns and categories,
    means and deviations, a vocabulary's words).
    """

    train: Split
    test: Split
    num_outputs: int
    num_groups: int = 0  # 0: there are no groups
    vocabulary: int | None = None
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    facts: dict[str, Any] | None = None

    def check(self, name: str) -> None:
        """Raises ValueError, naming the first offending index, unless the arrays are sound."""
        for what, split in (("train", self.train), ("test", self.test)):
            where = f"data.dataset: {name}: {what}"
            if not split.inputs:
                raise ValueError(f"{where} has no inputs; allowed is at least one array")
            for number, array in enumerate(split.inputs):
                _check_array(f"{where} inputs {number}", array, INPUT_TYPES)
            if split.targets is not None:
                _check_array(f"{where} targets", split.targets, TARGET_TYPES)
            if not len(split):
                raise ValueError(f"{where} is empty; a data set needs at least one sample in each split")
            _check_lengths(where, split)
            _check_numbers(f"{where} group", split.groups, self.num_groups)
            _check_numbers(f"{where} client", split.clients, None)
            if self.vocabulary is not None:
                _check_numbers(f"{where} token", split.inputs[0].reshape(-1), self.vocabulary)
        self._check_same_forms(name)

    def _check_same_forms(self, name: str) -> None:
        train, test = self.train, self.test
        pairs = [(f"inputs {n}", a, b) for n, (a, b) in enumerate(zip(train.inputs, test.inputs, strict=False))]
        pairs += [("targets", a, b) for a, b in [(train.targets, test.targets)] if a is not None and b is not None]
        for what, left, right in pairs:
            if left.shape[1:] != right.shape[1:] or left.dtype != right.dtype:
                raise ValueError(
                    f"data.dataset: {name}: {what} of a sample are {_form(left)} in train but {_form(right)} in test; "
                    "they must agree"
                )
        there = [(len(s.inputs), s.targets is None, s.groups is None) for s in (train, test)]
        if there[0] != there[1]:
            raise ValueError(
                f"data.dataset: {name}: train and test must both have as many inputs, and both targets and groups or "
                "none"
            )
        if self.num_outputs < 1:
            raise ValueError(f"data.dataset: {name}: num_outputs is {self.num_outputs}; allowed is at least 1")


def _form(array: np.ndarray) -> str:
    return f"{list(array.shape[1:])} of {array.dtype}"


def _check_array(what: str, array: Any, types: tuple[str, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.ndim < 1 or array.dtype.name not in types:
        found = f"a {type(array).__name__}"
        if isinstance(array, np.ndarray):
            found = f"type {array.dtype}" if array.ndim else "shape []"
        raise ValueError(f"{what} are of {found}; allowed are numpy arrays [n, ...] of {', '.join(types)}")
    if 0 in array.shape[1:]:
        raise ValueError(f"{what} have shape {list(array.shape)}; allowed is a size of at least 1 on each axis")
    if (index := first_not_finite(array)) is not None:
        raise ValueError(f"{what} at index {index} have a value that is not finite (nan or inf)")


def first_not_finite(array: np.ndarray) -> int | None:
    """Position of the first sample of `[n, ...]` with a number that is not finite."""
    if not np.issubdtype(array.dtype, np.floating):
        return None
    for start in range(0, len(array), _CHUNK):
        chunk = array[start : start + _CHUNK]
        finite = np.isfinite(chunk).all(axis=tuple(range(1, chunk.ndim)))
        if not finite.all():
            return start + int(np.argmin(finite))
    return None


def _check_lengths(where: str, split: Split) -> None:
    parts = [*split.inputs, split.targets, split.groups, split.clients]
    lengths = {len(part) for part in parts if part is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"{where} has inputs, targets, groups or clients of {sorted(lengths)} samples; all need as many"
        )


def _check_numbers(what: str, numbers: np.ndarray | None, count: int | None) -> None:
    if numbers is None:
        return
    if numbers.ndim != 1 or numbers.dtype != np.int64:
        raise ValueError(f"{what}s have shape {list(numbers.shape)} and type {numbers.dtype}; allowed is [n] of int64")
    outside = np.flatnonzero((numbers < 0) | (numbers >= count)) if count is not None else np.zeros(0)
    if len(outside):
        index = int(outside[0])
        raise ValueError(f"{what} at index {index} is {numbers[index]}; allowed is 0..{(count or 1) - 1}")


def numbered(train: np.ndarray, test: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids of any kind, `[n]`, as numbers in their order: the same ones in both splits."""
    ids = _different(train, test)
    numbers = np.searchsorted(ids, train).astype(np.int64)
    return numbers, None if test is None else np.searchsorted(ids, test).astype(np.int64)


def names_of(train: np.ndarray, test: np.ndarray | None) -> list[str]:
    """What `numbered` numbers, in its order: `facts["client_names"]`, from which a run has its `clients.json`."""
    return [str(each) for each in _different(train, test).tolist()]


def _different(train: np.ndarray, test: np.ndarray | None) -> np.ndarray:
    return np.unique(train if test is None else np.concatenate([train, test]))
