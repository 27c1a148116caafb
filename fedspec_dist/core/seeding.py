"""Random draws keyed by what they are for, never by rank, time or history.

Every draw in a run is a function of `(seed, purpose, *key)`, the key being the round, the client or both.
So a client's batches are the same whichever rank trains it, and a resumed run needs no generator state.
"""

from __future__ import annotations

import zlib

import numpy as np


def _sequence(seed: int, purpose: str, key: tuple[int, ...]) -> np.random.SeedSequence:
    # crc32 names the purpose with a number that, unlike hash(), is the same in every process.
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *key])


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """The generator of one purpose, for example `generator(seed, "batches", round, client)`."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, key)))


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit seed for a `torch.Generator`, keyed in the same way."""
    return int(_sequence(seed, purpose, key).generate_state(1, np.uint64)[0] >> 1)
