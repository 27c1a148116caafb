"""What a partition is made from, and what is checked of every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Clients = list[np.ndarray]


@dataclass(frozen=True)
class Samples:
    """What a partition may know of the training samples."""

    groups: np.ndarray | None  # int64 [N]: of a classification the labels
    client_ids: np.ndarray | None = None  # int64 [N]; of data collected by clients
    num_samples: int | None = None  # N; needed where there is neither

    def __post_init__(self) -> None:
        assert {len(part) for part in (self.groups, self.client_ids) if part is not None} <= {len(self)}

    def __len__(self) -> int:
        if self.num_samples is not None:
            return self.num_samples
        known = self.groups if self.groups is not None else self.client_ids
        assert known is not None
        return len(known)

    @property
    def labels(self) -> np.ndarray:
        """The groups, for partitions that cannot do without.

        Raises:
            ValueError: there are none.
        """
        if self.groups is None:
            raise ValueError(
                "data.partition: this one cuts by classes or groups of samples, which the data set does not have; "
                "allowed with it: iid, quantity_skew, natural, or data.bins, which makes groups of real targets"
            )
        return self.groups


def target_bins(targets: np.ndarray, num_bins: int) -> Callable[[np.ndarray], np.ndarray]:
    """What gives targets `[n]` or `[n, D]` their bin, int64 `[n]`, by the first value: `targets` fill the bins evenly.

    Raises:
        ValueError: there are fewer different values than bins.
    """
    first = _first(targets)
    edges = np.quantile(first, np.arange(1, num_bins) / num_bins)
    if len(np.unique(np.searchsorted(edges, first, side="right"))) < num_bins:
        raise ValueError(
            f"data.bins: got {num_bins}, but the training targets have {len(np.unique(first))} different values, which "
            "do not fill as many; allowed: fewer"
        )
    return lambda values: np.searchsorted(edges, _first(values), side="right").astype(np.int64)


def _first(targets: np.ndarray) -> np.ndarray:
    return targets.reshape(len(targets), -1)[:, 0]


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
    if num_parts > num_samples:
        raise ValueError(
            f"data.partition: {kind} over {num_parts} {parts} given; allowed is 1 to {num_samples}, "
            "the number of training samples"
        )


def require_min_size(num_samples: int, num_clients: int, min_size: int) -> None:
    """Raises ValueError when the clients cannot all have `min_size` samples."""
    if min_size * num_clients > num_samples:
        raise ValueError(
            f"data.partition.min_size: {min_size} given, but {num_samples} training samples over "
            f"{num_clients} clients allow 0 to {num_samples // num_clients}; lower it or the number of clients"
        )
