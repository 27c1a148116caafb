"""The JSON files of LEAF: users with their own training and test samples.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv 1812.01097: `train/*.json` and `test/*.json`,
each with `users` and `user_data`, whose `x` and `y` are lists of samples and labels.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.own_files import OwnFiles, digest_of
from fedspec_dist.data.raw import RawData, Split, names_of, numbered
from fedspec_dist.data.text.text import texts_as_data
from fedspec_dist.data.text.tokens import Words


class Leaf(OwnFiles):
    """Each user is a client, and test samples belong to theirs (`data.partition: natural`, `eval.on: [clients]`).

    Samples that are lists of numbers are images of `shape` if that is given (FEMNIST: `[28, 28]`), else rows of
    features; texts are sequences of characters (Shakespeare) or words (Sent140), by `tokenizer`. Labels are numbered
    in the order of those in training.

    Args:
        path: the folder with `train` and `test`.
        shape: of an image, in the order of its numbers: `[height, width]`, or with 1 or 3 channels first or last.
        tokenizer: `characters` or `words`.
    """

    name = "leaf"

    def __init__(
        self,
        root: Path,
        download: bool,
        seed: int,
        *,
        path: str,
        shape: list[int] | None,
        tokenizer: str,
        vocabulary_size: int,
        max_length: int,
    ) -> None:
        super().__init__(root, download, seed)
        self._path, self._shape, self._tokenizer = path, shape, tokenizer
        self._vocabulary_size, self._max_length = vocabulary_size, max_length

    def fingerprint(self) -> str:
        settings = (self._shape, self._tokenizer, self._vocabulary_size, self._max_length)
        return digest_of(("leaf 2", settings), [path for split in ("train", "test") for path in self._files(split)])

    def load(self) -> RawData | Arrays:
        (x, y, users), (test_x, test_y, test_users) = (self._read(split) for split in ("train", "test"))
        if isinstance(x[0], str):
            words = Words(x, self._vocabulary_size, 1, characters=self._tokenizer == "characters")
            return texts_as_data([x, test_x], [y, test_y], [users, test_users], words, self._max_length)
        if len(kinds := {type(label) for label in (*y, *test_y)}) > 1:
            raise ValueError(f"data.path: labels are {' and '.join(sorted(k.__name__ for k in kinds))}; allowed is one")
        classes = sorted(set(y))
        if unknown := sorted(set(test_y) - set(classes)):
            raise ValueError(f"data.path: a test sample has label {unknown[0]!r}, which no training sample has")
        labels = [np.searchsorted(classes, part).astype(np.int64) for part in (y, test_y)]
        owners = numbered(np.array(users), np.array(test_users))
        inputs = [self._numbers(part) for part in (x, test_x)]
        count = max(len(classes), 2)
        splits = [Split((inputs[n],), labels[n], labels[n], owners[n]) for n in range(2)]
        names = names_of(np.array(users), np.array(test_users))
        facts = {"classes": [str(label) for label in classes], "client_names": names}
        if self._shape is None:
            return RawData(splits[0], splits[1], count, count, facts=facts)
        images = Arrays.of((inputs[0], labels[0]), (inputs[1], labels[1]), count)
        images.check(self.name)
        return RawData(splits[0], splits[1], count, count, pixels=(images.mean, images.std), facts=facts)

    def _numbers(self, samples: list[Any]) -> np.ndarray:
        try:
            table = np.array(samples, dtype=np.float32)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"data.path: the samples in {self._path} are no lists of as many numbers: {error}"
            ) from error
        if self._shape is None:
            return table.reshape(len(table), -1)
        if table[0].size != math.prod(self._shape):
            raise ValueError(f"data.shape: got {self._shape}, but a sample has {table[0].size} numbers")
        images = table.reshape(len(table), *self._shape)
        return np.moveaxis(images, 1, 3) if _channels_first(self._shape) else images.reshape(*images.shape[:3], -1)

    def _files(self, split: str) -> list[Path]:
        folder = self.locate(Path(self._path) / split, folder=True)
        found = sorted(folder.glob("*.json"))
        if not found:
            raise ValueError(f"data.path: {folder} has no .json file, which LEAF's preprocessing writes there")
        return found

    def _read(self, split: str) -> tuple[list[Any], list[Any], list[str]]:
        samples, labels, owners = [], [], []
        for path in self._files(split):
            try:
                content = json.loads(path.read_bytes())
                for user in content["users"]:
                    data = content["user_data"][user]
                    if not isinstance(data["x"], list) or not isinstance(data["y"], list):
                        raise ValueError(f"x or y of user {user} is no list")
                    if len(data["x"]) != len(data["y"]):
                        raise ValueError(f"user {user} has {len(data['x'])} samples and {len(data['y'])} labels")
                    samples += [_as_text(sample) for sample in data["x"]]
                    labels += data["y"]
                    owners += [str(user)] * len(data["y"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(
                    f"data.path: {path} is not as LEAF writes it (users, and user_data with x and y): {reason}"
                ) from error
        kinds = {type(label) for label in labels} | {str if isinstance(s, str) else list for s in samples}
        if not samples or not kinds <= {str, int, list}:
            raise ValueError(
                f"data.path: the {split} files in {self._path} have {len(samples)} samples; allowed are texts or "
                "lists of numbers, with labels that are texts or whole numbers"
            )
        return samples, labels, owners


def _channels_first(shape: list[int]) -> bool:
    """Whether 1 or 3 channels stand before height and width; two entries have none."""
    if len(shape) == 2:
        return False
    first, last = shape[0] in (1, 3), shape[2] in (1, 3)
    if first == last:
        raise ValueError(
            f"data.shape: got {shape}; of three entries either the first or the last is the channels, which are 1 or 3"
        )
    return first


def _as_text(sample: Any) -> Any:
    """Sent140 has a list for each text, with the text as its fifth entry."""
    if isinstance(sample, list) and sample and all(isinstance(part, str) for part in sample):
        return sample[4] if len(sample) > 4 else " ".join(sample)
    return sample
