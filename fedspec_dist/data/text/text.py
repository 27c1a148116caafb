"""Texts in a table or in lines of JSON, with a label each, or to tell the next token of."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedspec_dist.data.own_files import UNREADABLE, OwnFiles, digest_of, open_text
from fedspec_dist.data.raw import RawData, Split, names_of, numbered
from fedspec_dist.data.text.tokens import Hashing, Tokenizer, Words, next_tokens, padded

_OF_THE_HOUSE = ("words", "characters", "hashing")


class Text(OwnFiles):
    """Inputs are token numbers `[n, max_length]`; the vocabulary is that of the training texts.

    Args:
        path: a `.csv` or `.jsonl` file (or `.gz` of one); its samples are split by `test_fraction` and the seed.
        train, test: two files, in place of one.
        text, label, client: names of columns or fields; without `client` the texts are nobody's.
        target: `label`, one class a text, or `next`, at each place the token that follows (task language).
        tokenizer: `words`, `characters`, `hashing` of words, or the path of a JSON file of the `tokenizers` library.
        min_count: how often a word must occur in the training texts.
    """

    name = "text"

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str | None,
        train: str | None,
        test: str | None,
        text: str,
        label: str,
        client: str | None,
        target: str,
        tokenizer: str,
        vocabulary_size: int,
        min_count: int,
        max_length: int,
        test_fraction: float,
    ) -> None:
        super().__init__(root, download, seed)
        if (path is None) == (train is None) or (train is None) != (test is None):
            raise ValueError("data.path: give one file, or data.train and data.test")
        self._paths = [("data.path", path)] if path is not None else [("data.train", train), ("data.test", test)]
        self._text, self._label, self._client = text, label, client
        self._target, self._tokenizer, self._max_length = target, tokenizer, max_length
        self._vocabulary_size, self._min_count, self._test_fraction = vocabulary_size, min_count, test_fraction

    def fingerprint(self) -> str:
        split = (self._test_fraction, self.seed) if len(self._paths) == 1 else ()
        names = (self._text, self._label, self._client, self._target)
        own = [] if self._tokenizer in _OF_THE_HOUSE else [self._tokenizer_file()]
        tokenizer = own[0].name if own else self._tokenizer  # wherever the file lies
        settings = (*names, tokenizer, self._vocabulary_size, self._min_count, self._max_length, split)
        return digest_of(("text 2", settings), [*self._located(), *own])

    def load(self) -> RawData:
        fields = [
            self._text,
            *([self._label] if self._target == "label" else []),
            *([self._client] if self._client else []),
        ]
        files = [read_records(path, fields) for path in self._located()]
        if len(files) == 1:
            parts = self.split(len(files[0][self._text]), self._test_fraction)
            train, test = ({name: [words[p] for p in part] for name, words in files[0].items()} for part in parts)
        else:
            train, test = files
        return texts_as_data(
            [train[self._text], test[self._text]],
            None if self._target == "next" else [train[self._label], test[self._label]],
            None if self._client is None else [train[self._client], test[self._client]],
            self._made_tokenizer(train[self._text]),
            self._max_length,
        )

    def _located(self) -> list[Path]:
        return [self.locate(path or "", key) for key, path in self._paths]

    def _made_tokenizer(self, texts: Sequence[str]) -> Tokenizer:
        if self._tokenizer == "hashing":
            return Hashing(self._vocabulary_size)
        if self._tokenizer in ("words", "characters"):
            return Words(texts, self._vocabulary_size, self._min_count, self._tokenizer == "characters")
        return _Library(self._tokenizer_file())

    def _tokenizer_file(self) -> Path:
        if not self._tokenizer.endswith(".json"):
            raise ValueError(
                f"data.tokenizer: got {self._tokenizer!r}; allowed: {', '.join(_OF_THE_HOUSE)}, or the path of a .json "
                "file of the tokenizers library"
            )
        return self.locate(self._tokenizer, "data.tokenizer")


class _Library:
    """A tokenizer of the `tokenizers` library; its numbers are moved by one, since 0 pads."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Made
        except ImportError as error:
            raise ValueError(
                "data.tokenizer: a file needs the package tokenizers: pip install tokenizers; allowed without it: "
                + ", ".join(_OF_THE_HOUSE)
            ) from error
        try:
            self._made: Any = Made.from_file(str(path))
        except Exception as error:  # the library's own are of this type
            raise ValueError(f"data.tokenizer: {path} is no file of the tokenizers library: {error}") from error
        self._name = path.name
        self.size = int(self._made.get_vocab_size()) + 1

    def __call__(self, text: str) -> list[int]:
        return [number + 1 for number in self._made.encode(text).ids]

    def facts(self) -> dict[str, Any]:
        return {"tokenizer": self._name}


def texts_as_data(
    texts: Sequence[Sequence[str]],  # of training and test
    labels: Sequence[Sequence[Any]] | None,  # None: the next token is told at each place
    clients: Sequence[Sequence[Any]] | None,
    tokenizer: Tokenizer,
    max_length: int,
) -> RawData:
    """Token numbers with their targets; labels are numbered in the order of those that training texts have.

    Raises:
        ValueError: a test text has another label.
    """
    rows = [[tokenizer(text) for text in part] for part in texts]
    owners: Sequence[np.ndarray | None] = [None, None]
    facts: dict[str, Any] = {**tokenizer.facts(), "max_length": max_length}
    if clients is not None:
        ids = [np.array([str(client) for client in part]) for part in clients]
        owners, facts["client_names"] = numbered(*ids), names_of(*ids)
    if labels is None:
        pairs = [next_tokens(part, max_length) for part in rows]
        splits = [Split((inputs,), targets, None, who) for (inputs, targets), who in zip(pairs, owners, strict=True)]
        return RawData(splits[0], splits[1], num_outputs=tokenizer.size, vocabulary=tokenizer.size, facts=facts)
    kinds = {type(label) for part in labels for label in part}
    if len(kinds) > 1:
        raise ValueError(f"data.label: some are {' and some '.join(sorted(k.__name__ for k in kinds))}; allowed is one")
    classes = sorted(set(labels[0]))
    numbers = {label: number for number, label in enumerate(classes)}
    if unknown := [label for label in labels[1] if label not in numbers]:
        raise ValueError(
            f"data.label: a test text has label {unknown[0]!r}, which no training text has; leave such texts out"
        )
    splits = []
    for part, given, who in zip(rows, labels, owners, strict=True):
        targets = np.array([numbers[label] for label in given], dtype=np.int64)
        splits.append(Split((padded(part, max_length),), targets, targets, who))
    count = max(len(classes), 2)
    facts["classes"] = [str(label) for label in classes]
    return RawData(splits[0], splits[1], count, count, vocabulary=tokenizer.size, facts=facts)


def read_records(path: Path, fields: Sequence[str]) -> dict[str, list[Any]]:
    """Field -> its value in each record of a `.csv` or `.jsonl` file.

    Raises:
        ValueError: it cannot be read, or a record lacks a field.
    """
    name = path.name.removesuffix(".gz").lower()
    if not name.endswith((".csv", ".jsonl", ".ndjson")):
        raise ValueError(f"data: {path} has another ending; allowed are .csv and .jsonl files, and .gz of them")
    lines = not name.endswith(".csv")
    found: dict[str, list[Any]] = {name: [] for name in fields}
    try:
        with open_text(path) as file:
            records = (json.loads(line) for line in file if line.strip()) if lines else _rows(path, file)
            for number, record in enumerate(records, start=1):
                for name in fields:
                    value = record.get(name) if isinstance(record, dict) else None
                    if not isinstance(value, (str, int)) or isinstance(value, bool):
                        there = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
                        raise ValueError(
                            f"data: {path}, record {number}: {name!r} is {value!r}; allowed is a text or a whole "
                            f"number (the record has: {there})"
                        )
                    found[name].append(value)
    except (*UNREADABLE, json.JSONDecodeError) as error:
        raise ValueError(f"data: cannot read {path}: {error}; allowed are .csv and .jsonl files in UTF-8") from error
    if not found[fields[0]]:
        raise ValueError(f"data: {path} has no records")
    found[fields[0]] = [str(text) for text in found[fields[0]]]
    return found


def _rows(path: Path, file: IO[str]) -> Iterator[dict[str, str]]:
    """The lines of a table, each with as many values as there are names."""
    reader = csv.DictReader(file, strict=True)
    names = list(reader.fieldnames or ())
    if len(set(names)) < len(names):
        raise ValueError(f"data: {path}: columns are named {', '.join(names)}; each needs a name of its own")
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(
                f"data: {path}, line {reader.line_num}: not as many values as there are columns ({len(names)}); put "
                "quotes around a text with commas"
            )
        yield row
