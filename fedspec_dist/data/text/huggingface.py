"""A data set that the `datasets` library has saved in a folder (`save_to_disk`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedspec_dist.data.images.arrays import channel_statistics
from fedspec_dist.data.own_files import OwnFiles, digest_of
from fedspec_dist.data.raw import RawData, Split, numbered
from fedspec_dist.data.text.text import texts_as_data
from fedspec_dist.data.text.tokens import Hashing, Words


class HuggingFace(OwnFiles):
    """Texts, images or rows of numbers, with a label each.

    Args:
        path: a folder with splits `train` and `test`, or of one data set, which `test_fraction` and the seed split.
        input, label, client: names of columns; without `input` it is the first of `text`, `image`, `features`.
        tokenizer: of texts, `words`, `characters` or `hashing`.
    """

    name = "huggingface"

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str,
        input: str | None,
        label: str,
        client: str | None,
        tokenizer: str,
        vocabulary_size: int,
        max_length: int,
        test_fraction: float,
    ) -> None:
        super().__init__(root, download, seed)
        self._path, self._input, self._label, self._client = path, input, label, client
        self._tokenizer, self._vocabulary_size, self._max_length = tokenizer, vocabulary_size, max_length
        self._test_fraction = test_fraction

    def fingerprint(self) -> str:
        folder = self.locate(self._path, folder=True)
        names = (self._input, self._label, self._client, self._tokenizer, self._vocabulary_size, self._max_length)
        found = sorted(p for p in folder.rglob("*") if p.suffix in (".arrow", ".json") and p.is_file())
        return digest_of(("huggingface 1", names, self._test_fraction, self.seed), found)

    def load(self) -> RawData:
        train, test = self._splits()
        name = self._input or next((n for n in ("text", "image", "features") if n in train.column_names), "")
        for needed in (name, self._label, *([self._client] if self._client else [])):
            if needed not in train.column_names:
                raise ValueError(
                    f"data.path: {self._path} has no column {needed or 'for the inputs'}; there are: "
                    f"{', '.join(train.column_names)} (data.input, data.label and data.client name them)"
                )
        for part, where in ((train, "train"), (test, "test")):
            for column in (name, self._label, *([self._client] if self._client else [])):
                if (place := next((n for n, value in enumerate(part[column]) if value is None), None)) is not None:
                    raise ValueError(
                        f"data.path: {self._path}: {column} of {where} sample {place} is missing; leave such ones out"
                    )
        labels = [list(part[self._label]) for part in (train, test)]
        clients = None if self._client is None else [list(part[self._client]) for part in (train, test)]
        values = [list(part[name]) for part in (train, test)]
        if isinstance(values[0][0], str):
            hashing = self._tokenizer == "hashing"
            made = (
                Hashing(self._vocabulary_size)
                if hashing
                else Words(values[0], self._vocabulary_size, 1, characters=self._tokenizer == "characters")
            )
            return texts_as_data(values, labels, clients, made, self._max_length)
        return _numbers_as_data(values, labels, clients)

    def _splits(self) -> tuple[Any, Any]:
        try:
            import datasets
        except ImportError as error:
            raise ValueError("data.dataset: huggingface needs the package datasets: pip install datasets") from error
        folder = self.locate(self._path, folder=True)
        try:
            found = datasets.load_from_disk(str(folder))
        except Exception as error:  # of many kinds
            raise ValueError(f"data.path: {folder} is not what save_to_disk of datasets writes: {error}") from error
        if hasattr(found, "keys"):
            if "train" not in found or "test" not in found:
                raise ValueError(f"data.path: {folder} has splits {', '.join(found)}; needed are train and test")
            return found["train"], found["test"]
        train, test = self.split(len(found), self._test_fraction)
        return found.select(train), found.select(test)


def _stacked(values: list[Any]) -> np.ndarray:
    """`[n, ...]` of the numbers or pixels of all samples.

    Raises:
        ValueError: they differ in size, or are neither.
    """
    found = [np.asarray(value) for value in values]
    wrong = next((n for n, array in enumerate(found) if array.shape != found[0].shape), None)
    if wrong is not None:
        raise ValueError(
            f"data.input: samples differ in size or channels ({list(found[0].shape)}, {list(found[wrong].shape)} at "
            f"{wrong}); bring all to one before they are saved"
        )
    if found[0].dtype.kind not in "buif":
        raise ValueError(
            f"data.input: a sample is of type {type(values[0]).__name__}; allowed are texts, images and lists of "
            "numbers"
        )
    return np.stack(found)


def _numbers_as_data(values: list[list[Any]], labels: list[list[Any]], clients: list[list[Any]] | None) -> RawData:
    """Images (uint8 `[H, W]` or `[H, W, C]`) or rows of numbers; whole labels are classes, real ones targets."""
    tables = [_stacked(part) for part in values]
    images = tables[0].dtype == np.uint8 and tables[0].ndim in (3, 4)
    inputs = [(t[..., None] if t.ndim == 3 else t) if images else t.astype(np.float32) for t in tables]
    owners = [None, None] if clients is None else numbered(*(np.array([str(c) for c in part]) for part in clients))
    pixels = channel_statistics(inputs[0]) if images else None
    given = [np.array(part) for part in labels]
    if np.issubdtype(given[0].dtype, np.floating):
        targets = [part.reshape(len(part), -1).astype(np.float32) for part in given]
        splits = [Split((inputs[n],), targets[n], None, owners[n]) for n in range(2)]
        return RawData(splits[0], splits[1], targets[0].shape[1], pixels=pixels)
    classes = np.unique(given[0])
    if len(unknown := np.setdiff1d(given[1], classes)):
        raise ValueError(f"data.label: a test sample has label {unknown[0]!r}, which no training sample has")
    numbers = [np.searchsorted(classes, part).astype(np.int64) for part in given]
    splits = [Split((inputs[n],), numbers[n], numbers[n], owners[n]) for n in range(2)]
    count = max(len(classes), 2)
    return RawData(splits[0], splits[1], count, count, pixels=pixels, facts={"classes": [str(c) for c in classes]})
