"""Which samples form which batch: orders and bounds, computed before training starts."""

from __future__ import annotations

import numpy as np


def epoch_orders(rng: np.random.Generator, num_samples: int, epochs: int) -> np.ndarray:
    """A fresh permutation of the client's samples for each epoch, int64 `[epochs * num_samples]`."""
    orders = [rng.permutation(num_samples) for _ in range(epochs)]
    return np.concatenate([np.empty(0, np.int64), *orders]).astype(np.int64)


def batch_bounds(num_samples: int, batch_size: int, epochs: int) -> list[tuple[int, int]]:
    """Start and stop of every batch in the concatenated orders.

    No batch spans two epochs and the last of an epoch may be smaller, down to one sample; a client with fewer
    samples than a batch has one batch an epoch, one without samples has none.
    """
    assert batch_size >= 1
    return [
        (epoch * num_samples + start, epoch * num_samples + min(start + batch_size, num_samples))
        for epoch in range(epochs)
        for start in range(0, num_samples, batch_size)
    ]
