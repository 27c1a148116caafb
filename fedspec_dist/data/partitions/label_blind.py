"""Partitions that do not look at labels: every client has the data set's mixture of classes."""

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
