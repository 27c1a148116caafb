"""A table in a file: columns of numbers and categories are the features, others the target and whose a sample is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedspec_dist.data.own_files import OwnFiles, digest_of
from fedspec_dist.data.raw import RawData, Split, names_of, numbered
from fedspec_dist.data.tables.columns import Feature, Table, as_numbers, read_table, require_words


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
            regression for numbers that are not all whole, of several columns, or standardised.
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
        return digest_of(("csv 3", settings), self._located())

    def load(self) -> RawData:
        tables = [read_table(path) for path in self._located()]
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
        columns = [Feature.of(train, name) for name in names]
        inputs = [np.concatenate([column.of_table(table) for column in columns], axis=1) for table in (train, test)]
        targets, num_outputs, num_groups, of_targets = self._read_targets(train, test)
        clients: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        facts: dict[str, Any] = {"features": [column.facts() for column in columns], "targets": of_targets}
        if self._client is not None:
            ids = [np.array(table.column(self._client)) for table in (train, test)]
            clients, facts["client_names"] = numbered(*ids), names_of(*ids)
        groups = targets if num_groups else (None, None)
        made = [Split((inputs[n],), targets[n], groups[n], clients[n]) for n in range(2)]
        return RawData(
            made[0],
            made[1],
            num_outputs,
            num_groups,
            facts=facts,
        )

    def _located(self) -> list[Path]:
        return [self.locate(path or "", key) for key, path in self._paths]

    def _read_targets(
        self, train: Table, test: Table
    ) -> tuple[tuple[np.ndarray, np.ndarray], int, int, list[dict[str, Any]]]:
        """Of both tables, how many outputs and groups that makes, and what is to be known of them."""
        words = [train.column(name) for name in self._targets]
        numeric = all(as_numbers(column) is not None for column in words)
        whole = numeric and all(float(word).is_integer() for column in words for word in column)
        kind = self._kind
        if kind == "auto":
            amounts = not whole or len(words) > 1 or self._standardize_target
            kind = "regression" if numeric and amounts else "classification"
        if kind == "classification":
            if len(words) > 1:
                raise ValueError(f"data.target: got {self._targets}; of a classification allowed is one column")
            name = self._targets[0]
            if numeric:  # 1 and 1.0 are one class
                Feature.of(train, name, "data.target")
                values = sorted({float(word) for word in words[0]})
                classes = [f"{value:.0f}" if value.is_integer() else repr(value) for value in values]
                numbers: dict[Any, int] = {value: number for number, value in enumerate(values)}
            else:
                if self._kind == "auto":
                    require_words(train, name, "data.target", words[0])
                classes = sorted(set(words[0]))
                numbers = {word: number for number, word in enumerate(classes)}
            hint = "; where whole numbers are amounts: data.kind: regression" if numeric else ""
            first, second = (table.mapped(name, numbers, numeric, hint) for table in (train, test))
            count = max(len(classes), 2)
            return (first, second), count, count, [{"classes": classes}]
        columns = [
            Feature.of(train, name, "data.target", standardize=self._standardize_target) for name in self._targets
        ]
        if any(column.categories is not None for column in columns):
            raise ValueError(f"data.target: a column of {self._targets} has words; of a regression allowed are numbers")
        made = [np.concatenate([column.of_table(table) for column in columns], axis=1) for table in (train, test)]
        return (made[0], made[1]), len(columns), 0, [column.facts() for column in columns]
