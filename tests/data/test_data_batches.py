"""Orders and bounds of batches."""

from __future__ import annotations

import numpy as np
import pytest

from fedspec_dist.rounds.sampling import batch_bounds, epoch_orders


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "epochs", "expected"),
    [
        (5, 2, 1, [(0, 2), (2, 4), (4, 5)]),
        (4, 2, 2, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (5, 4, 2, [(0, 4), (4, 5), (5, 9), (9, 10)]),
        (3, 50, 2, [(0, 3), (3, 6)]),
        (1, 1, 1, [(0, 1)]),
        (0, 50, 5, []),
        (7, 3, 0, []),
    ],
)
def test_batch_bounds(num_samples: int, batch_size: int, epochs: int, expected: list) -> None:
    assert batch_bounds(num_samples, batch_size, epochs) == expected


def test_each_epoch_is_a_fresh_permutation() -> None:
    orders = epoch_orders(np.random.default_rng(0), 20, 3)
    assert orders.dtype == np.int64
    epochs = orders.reshape(3, 20)
    assert all(sorted(epoch.tolist()) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


@pytest.mark.parametrize(("num_samples", "epochs"), [(0, 3), (5, 0)])
def test_no_samples_or_no_epochs_is_no_order(num_samples: int, epochs: int) -> None:
    orders = epoch_orders(np.random.default_rng(0), num_samples, epochs)
    assert orders.shape == (0,)
    assert orders.dtype == np.int64
