"""From texts to rows of token numbers: 0 pads, 1 is a token that is not known."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

PADDING, UNKNOWN = 0, 1
NUM_SPECIAL = 2
# The target at a place of a sequence that does not count; `task.ignore_index` of language.
IGNORED = -100
_WORD = re.compile(r"\w+|[^\w\s]")


class Tokenizer(Protocol):
    size: int  # of the vocabulary, with padding and unknown

    def __call__(self, text: str) -> list[int]: ...

    def facts(self) -> dict[str, Any]: ...


class Words:
    """Lower-case words and signs, or characters, that occur in the training texts: the most frequent ones first."""

    def __init__(self, texts: Iterable[str], vocabulary_size: int, min_count: int, characters: bool = False) -> None:
        self._characters = characters
        counts = Counter(token for text in texts for token in self._tokens(text))
        kept = sorted((token for token, count in counts.items() if count >= min_count), key=lambda t: (-counts[t], t))
        self._numbers = {
            token: NUM_SPECIAL + place for place, token in enumerate(kept[: vocabulary_size - NUM_SPECIAL])
        }
        self.size = NUM_SPECIAL + len(self._numbers)

    def __call__(self, text: str) -> list[int]:
        return [self._numbers.get(token, UNKNOWN) for token in self._tokens(text)]

    def facts(self) -> dict[str, Any]:
        return {"tokenizer": "characters" if self._characters else "words", "vocabulary": list(self._numbers)}

    def _tokens(self, text: str) -> Sequence[str]:
        return text if self._characters else _WORD.findall(text.lower())


class Hashing:
    """Lower-case words and signs by a hash of theirs: no vocabulary, and some share a number."""

    def __init__(self, vocabulary_size: int) -> None:
        self.size = vocabulary_size

    def __call__(self, text: str) -> list[int]:
        buckets = self.size - NUM_SPECIAL
        return [
            NUM_SPECIAL + zlib.crc32(token.encode(errors="surrogatepass")) % buckets
            for token in _WORD.findall(text.lower())
        ]

    def facts(self) -> dict[str, Any]:
        return {"tokenizer": "hashing", "vocabulary_size": self.size}


def padded(rows: Sequence[Sequence[int]], length: int, value: int = PADDING) -> np.ndarray:
    """`[n, length]` int64: each row's first tokens, filled up with `value`."""
    result = np.full((len(rows), length), value, dtype=np.int64)
    for place, row in enumerate(rows):
        kept = row[:length]
        result[place, : len(kept)] = kept
    return result


def next_tokens(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and, at each place, the token that comes next, `[n, length]` each; nothing counts where there is none."""
    return padded([row[: length + 1][:-1] for row in rows], length), padded(
        [row[: length + 1][1:] for row in rows], length, IGNORED
    )
