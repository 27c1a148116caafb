"""A table of words, and its columns as numbers: standardised, or a row of zeros and a one for each category."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedspec_dist.data.own_files import UNREADABLE, open_text

# More words than this in a column are no categories: each would be a column of its own.
_MAX_CATEGORIES = 1000


@dataclass(frozen=True)
class Table:
    """Words, line by line, and where they stand."""

    path: Path
    names: Sequence[str]
    lines: Sequence[Sequence[str]]
    numbers: Sequence[int]  # of the lines in the file, from 1

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self, places: np.ndarray) -> Table:
        return Table(self.path, self.names, [self.lines[p] for p in places], [self.numbers[p] for p in places])

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

    def mapped(self, name: str, numbers: dict[Any, int], numeric: bool, hint: str = "") -> np.ndarray:
        """The numbers of a column's words, or of what they are as numbers, int64 `[n]`; `hint` ends an error."""
        words = self.column(name)
        keys = [float(word) if numeric and _is_finite(word) else word for word in words]
        unknown = next((place for place, key in enumerate(keys) if key not in numbers), None)
        if unknown is not None:
            raise ValueError(
                f"data: {self.path}, line {self.numbers[unknown]}: {name} is {words[unknown]!r}, which no training "
                f"sample has{hint}"
            )
        return np.array([numbers[key] for key in keys], dtype=np.int64)


def read_table(path: Path) -> Table:
    """Raises ValueError: it cannot be read, has no sample, no names or twice the same, or a line of another length."""
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
    return Table(path, names, lines[1:], numbers[1:])


@dataclass(frozen=True)
class Feature:
    """A column of the training samples, as numbers: one, or one for each category."""

    name: str
    categories: Sequence[str] | None
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, table: Table, name: str, key: str = "data.features", standardize: bool = True) -> Feature:
        words = table.column(name)
        values = as_numbers(words)
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

    def of_table(self, table: Table) -> np.ndarray:
        """`[n, 1]` or `[n, number of categories]`, float32."""
        words = table.column(self.name)
        if self.categories is not None:
            return np.array([[word == category for category in self.categories] for word in words], dtype=np.float32)
        values = as_numbers(words)
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


def _categories(table: Table, name: str, key: str, words: Sequence[str]) -> list[str]:
    """A column's different words.

    Raises:
        ValueError: see `require_words`; or there are too many.
    """
    require_words(table, name, key, words)
    found = sorted(set(words))
    if len(found) > _MAX_CATEGORIES:
        raise ValueError(
            f"{key}: {table.path}: {name} has {len(found)} different words; allowed are {_MAX_CATEGORIES}, since each "
            "becomes a column: leave it out"
        )
    return found


def require_words(table: Table, name: str, key: str, words: Sequence[str]) -> None:
    """Raises ValueError where most words of a column are numbers, so that the others say that something is missing."""
    others = [place for place, word in enumerate(words) if not _is_finite(word)]
    if 2 * len(others) < len(words):
        raise ValueError(
            f"{key}: {table.path}, line {table.numbers[others[0]]}: {name} is {words[others[0]]!r}, but most of the "
            "column are numbers; fill it, or leave the line or the column out"
        )


def _is_finite(word: str) -> bool:
    values = as_numbers([word])
    return values is not None and bool(np.isfinite(values).all())


def as_numbers(words: Sequence[str]) -> np.ndarray | None:
    """float64, or None where one of them is no number."""
    try:
        return np.array([float(word) for word in words])
    except ValueError:
        return None
