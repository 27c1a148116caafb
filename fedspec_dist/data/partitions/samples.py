"""What a partition is made from, and what is checked of every one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Clients = list[np.ndarray]


@dataclass(frozen=True)
class Samples:
    """What a partition may know of the training samples."""

    labels: np.ndarray  # int64 [N]
    client_ids: np.ndarray | None = None  # int64 [N]; of data collected by clients

    def __post_init__(self) -> None:
        assert self.client_ids is None or self.client_ids.shape == self.labels.shape

    def __len__(self) -> int:
        return len(self.labels)


def class_counts(labels: np.ndarray, clients: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """Samples of each class at each client, int64 `[num_clients, num_classes]`."""
    return np.stack([np.bincount(labels[indices], minlength=num_classes) for indices in clients])


def checked(clients: Sequence[np.ndarray], num_samples: int, complete: bool = True) -> Clients:
    """Sorted, as int64; asserts that no sample is given twice and, when `complete`, that all are given."""
    together = np.concatenate(list(clients)).astype(np.int64)
    times_given = np.bincount(together, minlength=num_samples)
    assert len(times_given) == num_samples, "a sample that does not exist was given"
    assert times_given.max() <= 1, "a sample was given to two clients"
    assert not complete or times_given.all(), "a sample was given to no client"
    return [np.sort(indices).astype(np.int64) for indices in clients]


def require_enough(num_samples: int, num_parts: int, kind: str, parts: str = "clients") -> None:
    """Raises ValueError when some part would be empty."""
    if not 1 <= num_parts <= num_samples:
        raise ValueError(
            f"data.partition: {kind} over {num_parts} {parts} given; allowed is 1 to {num_samples}, "
            "the number of training samples"
        )


def require_min_size(num_samples: int, num_clients: int, min_size: int) -> None:
    """Raises ValueError when the clients cannot all have `min_size` samples."""
    if num_clients < 1:
        raise ValueError(f"data.partition.clients: {num_clients} given; allowed is at least 1")
    if not 0 <= min_size * num_clients <= num_samples:
        raise ValueError(
            f"data.partition.min_size: {min_size} given, but {num_samples} training samples over "
            f"{num_clients} clients allow 0 to {num_samples // num_clients}; lower it or the number of clients"
        )
