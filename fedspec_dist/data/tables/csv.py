"""A table in a file: columns of numbers and categories are the features, others the target and whose a sample is."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedspec_dist.data.own_files import UNREADABLE, OwnFiles, digest_of, open_text
from fedspec_dist.data.raw import RawData, Split, numbered

# More words than this in a column are no categories: each would be a column of its own.
_MAX_CATEGORIES = 1000


class Csv(OwnFiles):
    """Numbers are standardised with mean and deviation of the training samples, categories become a column of 0 and 1
    for each that the training samples have; in a test sample another one is all zeros.

    Args:
        path: a file with a line of names; its samples are split by `test_fraction` and the seed.
        train, test: two files, in place of one.
        target: the name of a column, or several of numbers.
        features: names of columns; all others when not given.
        client: the column that says whose a sample is.
        kind: `classification` numbers the targets' values in their order, `regression` takes them as numbers; `auto` is
            regression for numbers that are not all whole, or of several columns.
        standardize_target: of a regression; then metrics are in units of the deviation.
    """

    name = "csv"

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str | None,
        train: str | None,
        test: str | None,
        target: str | list[str],
        features: list[str] | None,
        client: str | None,
        kind: str,
        test_fraction: float,
        standardize_target: bool,
    ) -> None:
        super().__init__(root, download, seed)
        if (path is None) == (train is None) or (train is None) != (test is None):
            raise ValueError("data.path: give one file, or data.train and data.test")
        self._paths = [("data.path", path)] if path is not None else [("data.train", train), ("data.test", test)]
        self._targets = [target] if isinstance(target, str) else target
        self._features, self._client, self._kind = features, client, kind
        self._test_fraction, self._standardize_target = test_fraction, standardize_target

    def fingerprint(self) -> str:
        split = (self._test_fraction, self.seed) if len(self._paths) == 1 else ()
        settings = (self._targets, self._features, self._client, self._kind, self._standardize_target, split)
        return digest_of(("csv 2", settings), self._located())

    def load(self) -> RawData:
        tables = [_read(path) for path in self._located()]
        if len(tables) == 1:
            train, test = (tables[0].rows(places) for places in self.split(len(tables[0]), self._test_fraction))
        else:
            train, test = tables
        names = self._features
        if names is None:
            names = [name for name in train.names if name not in (*self._targets, self._client)]
        if not names:
            raise ValueError("data.features: no column is left for the features; allowed: at least one")
        for key, given in (("features", names), ("target", self._targets)):
            if len(set(given)) < len(given):
                raise ValueError(f"data.{key}: got {given}; allowed is each column once")
        if both := sorted({*names} & {*self._targets, self._client}):
            raise ValueError(
                f"data.features: {both[0]!r} is the target or the client as well; a model would be told what it is to "
                "find out: leave it out"
            )
        columns = [_Feature.of(train, name) for name in names]
        inputs = [np.concatenate([column.of_table(table) for column in columns], axis=1) for table in (train, test)]
        targets, num_outputs, num_groups, of_targets = self._read_targets(train, test)
        clients: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if self._client is not None:
            clients = numbered(*(np.array(table.column(self._client)) for table in (train, test)))
        groups = targets if num_groups else (None, None)
        made = [Split((inputs[n],), targets[n], groups[n], clients[n]) for n in range(2)]
        return RawData(
            made[0],
            made[1],
            num_outputs,
            num_groups,
            facts={"features": [column.facts() for column in columns], "targets": of_targets},
        )

    def _located(self) -> list[Path]:
        return [self.locate(path or "", key) for key, path in self._paths]

    def _read_targets(
        self, train: _Table, test: _Table
    ) -> tuple[tuple[np.ndarray, np.ndarray], int, int, list[dict[str, Any]]]:
        """Of both tables, how many outputs and groups that makes, and what is to be known of them."""
        words = [train.column(name) for name in self._targets]
        numeric = all(_numbers(column) is not None for column in words)
        whole = numeric and all(float(word).is_integer() for column in words for word in column)
        kind = self._kind
        if kind == "auto":
            kind = "regression" if numeric and (not whole or len(words) > 1) else "classification"
        if kind == "classification":
            if len(words) > 1:
                raise ValueError(f"data.target: got {self._targets}; of a classification allowed is one column")
            name = self._targets[0]
            if numeric:  # 1 and 1.0 are one class
                _Feature.of(train, name, "data.target")
                values = sorted({float(word) for word in words[0]})
                classes = [f"{value:.0f}" if value.is_integer() else repr(value) for value in values]
                numbers: dict[Any, int] = {value: number for number, value in enumerate(values)}
            else:
                classes = sorted(set(words[0]))
                numbers = {word: number for number, word in enumerate(classes)}
            first, second = (table.mapped(name, numbers, numeric) for table in (train, test))
            count = max(len(classes), 2)
            return (first, second), count, count, [{"classes": classes}]
        columns = [
            _Feature.of(train, name, "data.target", standardize=self._standardize_target) for name in self._targets
        ]
        if any(column.categories is not None for column in columns):
            raise ValueError(f"data.target: a column of {self._targets} has words; of a regression allowed are numbers")
        made = [np.concatenate([column.of_table(table) for column in columns], axis=1) for table in (train, test)]
        return (made[0], made[1]), len(columns), 0, [column.facts() for column in columns]


@dataclass(frozen=True)
class _Table:
    """Words, line by line, and where they stand."""

    path: Path
    names: Sequence[str]
    lines: Sequence[Sequence[str]]
    numbers: Sequence[int]  # of the lines in the file, from 1

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self, places: np.ndarray) -> _Table:
        return _Table(self.path, self.names, [self.lines[p] for p in places], [self.numbers[p] for p in places])

    def column(self, name: str) -> list[str]:
        if name not in self.names:
            raise ValueError(f"data: {self.path} has no column {name!r}; there are: {', '.join(self.names)}")
        place = self.names.index(name)
        words = [line[place].strip() for line in self.lines]
        if "" in words:
            raise ValueError(
                f"data: {self.path}, line {self.numbers[words.index('')]}: column {name!r} is empty; fill it, or leave "
                "the line or the column out"
            )
        return words

    def mapped(self, name: str, numbers: dict[Any, int], numeric: bool) -> np.ndarray:
        """The numbers of a column's words, or of what they are as numbers, int64 `[n]`."""
        words = self.column(name)
        keys = [float(word) if numeric and _is_finite(word) else word for word in words]
        unknown = next((place for place, key in enumerate(keys) if key not in numbers), None)
        if unknown is not None:
            raise ValueError(
                f"data: {self.path}, line {self.numbers[unknown]}: {name} is {words[unknown]!r}, which no training "
                "sample has"
            )
        return np.array([numbers[key] for key in keys], dtype=np.int64)


@dataclass(frozen=True)
class _Feature:
    """A column of the training samples, as numbers: one, or one for each category."""

    name: str
    categories: Sequence[str] | None
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, table: _Table, name: str, key: str = "data.features", standardize: bool = True) -> _Feature:
        words = table.column(name)
        values = _numbers(words)
        if values is None:
            return cls(name, _categories(table, name, key, words))
        if not np.isfinite(values).all():
            place = int(np.argmin(np.isfinite(values)))
            where = f"{table.path}, line {table.numbers[place]}"
            raise ValueError(f"{key}: {where}: {name} is {words[place]!r}; allowed are finite numbers")
        if not standardize:
            return cls(name, None)
        if np.ptp(values) == 0:  # the deviation of equal numbers need not be 0, since their mean is rounded
            return cls(name, None, float(values[0]), 1.0)
        return cls(name, None, float(values.mean()), float(values.std()) or 1.0)

    def of_table(self, table: _Table) -> np.ndarray:
        """`[n, 1]` or `[n, number of categories]`, float32."""
        words = table.column(self.name)
        if self.categories is not None:
            return np.array([[word == category for category in self.categories] for word in words], dtype=np.float32)
        values = _numbers(words)
        if values is None or not np.isfinite(values).all():
            place = next(place for place, word in enumerate(words) if not _is_finite(word))
            raise ValueError(
                f"data: {table.path}, line {table.numbers[place]}: {self.name} is {words[place]!r}; the column has "
                "finite numbers in the training samples, so it must here"
            )
        return ((values - self.mean) / self.std).astype(np.float32)[:, None]

    def facts(self) -> dict[str, Any]:
        if self.categories is not None:
            return {"name": self.name, "categories": list(self.categories)}
        return {"name": self.name, "mean": self.mean, "std": self.std}


def _categories(table: _Table, name: str, key: str, words: Sequence[str]) -> list[str]:
    """A column's different words.

    Raises:
        ValueError: nearly all are numbers, so that the others say that something is missing; or there are too many.
    """
    others = [place for place, word in enumerate(words) if not _is_finite(word)]
    if 2 * len(others) < len(words):
        raise ValueError(
            f"{key}: {table.path}, line {table.numbers[others[0]]}: {name} is {words[others[0]]!r}, but most of the "
            "column are numbers; fill it, or leave the line or the column out"
        )
    found = sorted(set(words))
    if len(found) > _MAX_CATEGORIES:
        raise ValueError(
            f"{key}: {table.path}: {name} has {len(found)} different words; allowed are {_MAX_CATEGORIES}, since each "
            "becomes a column: leave it out"
        )
    return found


def _is_finite(word: str) -> bool:
    values = _numbers([word])
    return values is not None and bool(np.isfinite(values).all())


def _numbers(words: Sequence[str]) -> np.ndarray | None:
    """float64, or None where one of them is no number."""
    try:
        return np.array([float(word) for word in words])
    except ValueError:
        return None


def _read(path: Path) -> _Table:
    try:
        with open_text(path) as file:
            reader = csv.reader(file, strict=True)
            lines, numbers = [], []
            for line in reader:
                if line:
                    lines.append(line)
                    numbers.append(reader.line_num)
    except UNREADABLE as error:
        raise ValueError(f"data: cannot read {path}: {error}; allowed is a table in UTF-8, with commas") from error
    if len(lines) < 2:
        raise ValueError(
            f"data: {path} has {len(lines)} lines; allowed is a line of names and at least one of a sample"
        )
    names = [name.strip() for name in lines[0]]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"data: {path}: columns are named {', '.join(names)}; each needs a name of its own")
    wrong = next((place for place, line in enumerate(lines) if len(line) != len(names)), None)
    if wrong is not None:
        raise ValueError(
            f"data: {path}, line {numbers[wrong]}: {len(lines[wrong])} values, but there are {len(names)} columns"
        )
    return _Table(path, names, lines[1:], numbers[1:])
