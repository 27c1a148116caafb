"""Partitions that do not look at labels: cut at random, or as the data came."""

from __future__ import annotations

import numpy as np

from .samples import Clients, Samples, checked, require_enough, require_min_size


def iid(samples: Samples, num_clients: int, rng: np.random.Generator) -> Clients:
    """A random permutation cut into parts whose sizes differ by at most one.

    Raises:
        ValueError: more clients than samples.
    """
    require_enough(len(samples), num_clients, "iid")
    return checked(np.array_split(rng.permutation(len(samples)), num_clients), len(samples))


def quantity_skew(
    samples: Samples, num_clients: int, rng: np.random.Generator, *, sigma: float, min_size: int
) -> Clients:
    """A random permutation cut into parts of log-normal sizes, `log size ~ N(const, sigma^2)`.

    Every client gets `min_size` samples and its share `exp(sigma z) / sum exp(sigma z)`, `z ~ N(0, 1)`, of the others.
    Everything is given out; sigma 0 is iid. The sizes of `unbalanced_sgm` in the program of D. A. E. Acar et al.,
    "Federated Learning Based on Dynamic Regularization", ICLR 2021, which gives the rounding's rest to its first
    client; here it goes to the largest fractions.

    Raises:
        ValueError: `min_size` is out of reach.
    """
    require_min_size(len(samples), num_clients, min_size)
    normal = rng.standard_normal(num_clients)
    weights = np.exp(sigma * (normal - normal.max()))  # relative to the largest, so that nothing overflows
    sizes = min_size + apportioned(weights / weights.sum(), len(samples) - num_clients * min_size)
    return checked(np.split(rng.permutation(len(samples)), np.cumsum(sizes)[:-1]), len(samples))


def apportioned(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that add up to `total`, int64 `[n]`: `shares * total` cut, the rest to the largest fractions."""
    sizes = np.floor(shares * total).astype(np.int64)
    by_fraction = np.argsort(sizes - shares * total, kind="stable")
    sizes[by_fraction[: total - sizes.sum()]] += 1
    return sizes


def natural(samples: Samples, num_clients: int | None, rng: np.random.Generator) -> Clients:
    """Each client holds the samples of one id: who wrote, photographed or measured them.

    There are as many clients as ids when their number is not given. With fewer clients than ids a random subset of the
    ids is used, in ascending order; samples of the others are unused.

    Raises:
        ValueError: the data set has no ids, or fewer than clients.
    """
    if samples.client_ids is None:
        raise ValueError(
            "data.partition.type: natural needs to know whose each training sample is, which this data set does not "
            "say; name the column in data.client (csv, text, huggingface), give an npz file train_clients (an id for "
            "each training sample), or use another partition"
        )
    ids = np.unique(samples.client_ids)
    num_clients = len(ids) if num_clients is None else num_clients
    if not 1 <= num_clients <= len(ids):
        raise ValueError(
            f"data.partition.clients: {num_clients} given; allowed is 1 to {len(ids)}, the number of clients in the "
            "data set, or null for all of them"
        )
    chosen = np.sort(rng.choice(ids, num_clients, replace=False))
    order = np.argsort(samples.client_ids, kind="stable")
    in_order = samples.client_ids[order]
    starts, stops = (np.searchsorted(in_order, chosen, side) for side in ("left", "right"))
    clients = [order[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return checked(clients, len(samples), complete=num_clients == len(ids))
