"""Partitions by draws from a Dirichlet distribution: the smaller alpha, the fewer classes a client sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .samples import Clients, Samples, checked, require_enough, require_min_size


def dirichlet(
    samples: Samples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    min_size: int,
    max_tries: int,
) -> Clients:
    """Each class is split over the clients in proportions `q ~ Dir(alpha)`, up to a cap on sizes.

    A client with `N / num_clients` samples or more is left out of the following classes. The whole draw is
    repeated until every client has `min_size` samples. Everything is given out; sizes differ. The procedure
    of MOON, FedDecorr and FedRCL ("unbalanced"), after M. Yurochkin et al., "Bayesian Nonparametric Federated
    Learning of Neural Networks", ICML 2019.

    Raises:
        ValueError: `min_size` is out of reach, or not reached in `max_tries` draws.
    """
    cap = len(samples) / max(num_clients, 1)
    return _split_classes("dirichlet", samples, num_clients, rng, alpha, min_size, max_tries, cap)


def dirichlet_uncapped(
    samples: Samples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    min_size: int,
    max_tries: int,
) -> Clients:
    """Each class is split over the clients in proportions `q ~ Dir(alpha)`, whatever they have already.

    As `dirichlet` without the cap, so sizes differ more. Everything is given out. With `min_size` 0 the first draw is
    taken, and clients may be left without samples; they never take part. The partition of FL-bench, and of flower's
    `DirichletPartitioner` without `self_balancing`.

    Raises:
        ValueError: `min_size` is out of reach, or not reached in `max_tries` draws.
    """
    return _split_classes("dirichlet_uncapped", samples, num_clients, rng, alpha, min_size, max_tries, cap=np.inf)


def dirichlet_balanced(samples: Samples, num_clients: int, rng: np.random.Generator, *, alpha: float) -> Clients:
    """Each client draws a class prior `P ~ Dir(alpha)`, then exactly `N // num_clients` of the samples left.

    Clients draw in order. A sample left weighs `P[its class]`, so the expected share of a class is
    proportional to `P * samples left`; the last clients take what remains. Up to `num_clients - 1` samples
    are unused. FedRCL's "balanced" split and FIPA's default, after T.-M. H. Hsu, H. Qi, M. Brown, "Measuring
    the Effects of Non-Identical Data Distribution for Federated Visual Classification", arXiv:1909.06335,
    2019.

    Raises:
        ValueError: more clients than samples.
    """
    require_enough(len(samples), num_clients, "dirichlet_balanced")
    labels = samples.labels
    num_classes = int(labels.max()) + 1
    size = len(labels) // num_clients
    remaining = _Remaining(labels, num_classes)
    clients = []
    for _ in range(num_clients):
        prior = _dirichlet(alpha, num_classes, rng)
        chosen = remaining.draw_few(prior, size, rng)
        if chosen is None:
            chosen = _draw_weighted(np.flatnonzero(remaining.unassigned), prior, labels, size, rng)
        remaining.take(chosen)
        clients.append(chosen)
    return checked(clients, len(labels), complete=False)


class _Remaining:
    """The samples that nobody has yet, counted in blocks, so that a few of very many are drawn in little time."""

    _BLOCK, _MANY, _MOST_DRAWN = 256, 4096, 64
    # Sums over blocks and sums over samples differ in their last digits; what lies nearer is not told apart here.
    _NEAR = 1e-9

    def __init__(self, labels: np.ndarray, num_classes: int) -> None:
        padding = -len(labels) % self._BLOCK
        self._labels = np.concatenate([labels, np.zeros(padding, labels.dtype)]).reshape(-1, self._BLOCK)
        self._open = np.concatenate([np.ones(len(labels), bool), np.zeros(padding, bool)]).reshape(-1, self._BLOCK)
        self.unassigned = self._open.reshape(-1)[: len(labels)]
        num_blocks = len(self._labels)
        places = np.arange(num_blocks)[:, None] * num_classes + self._labels
        self._counts = np.bincount(places[self._open], minlength=num_blocks * num_classes).reshape(num_blocks, -1)

    def take(self, chosen: np.ndarray) -> None:
        self.unassigned[chosen] = False
        np.subtract.at(self._counts, (chosen // self._BLOCK, self._labels.reshape(-1)[chosen]), 1)

    def draw_few(self, prior: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray | None:
        """What `_draw_weighted` would draw with this generator; None, and nothing drawn, where that is not sure."""
        weights = self._counts @ prior  # of the blocks
        ends = np.cumsum(weights)
        total = ends[-1]
        if size > self._MOST_DRAWN or not total > 0 or (prior[prior > 0] < 1e-290 * total).any():
            return None
        if self._counts[:, prior > 0].sum() < self._MANY:
            return None
        before = rng.bit_generator.state
        points = rng.random(size) * total
        blocks = np.searchsorted(ends, points, side="right").clip(max=len(ends) - 1)
        inside = np.where(self._open[blocks], prior[self._labels[blocks]], 0.0)  # [size, _BLOCK]
        sums = np.cumsum(inside, axis=1) + (ends[blocks] - weights[blocks])[:, None]
        places = (sums <= points[:, None]).sum(axis=1)
        chosen = blocks * self._BLOCK + places
        near = np.abs(sums - points[:, None]).min(initial=np.inf) < self._NEAR * total
        if near or places.max() >= self._BLOCK or len(np.unique(chosen)) < size:
            rng.bit_generator.state = before
            return None
        return chosen


def capped_shares(shares: np.ndarray, sizes: np.ndarray, cap: float) -> np.ndarray:
    """The shares `[n]` of clients below the cap, scaled to sum 1; all zero when none has any."""
    open_shares = np.where(sizes < cap, shares, 0.0)
    total = open_shares.sum()
    return open_shares / total if total > 0 else np.zeros_like(open_shares)


def cut_points(shares: np.ndarray, num_samples: int) -> np.ndarray:
    """Where to cut a class into `n` pieces: `floor(cumsum(shares) * num_samples)` but the last, `[n - 1]`."""
    return np.floor(np.cumsum(shares) * num_samples).astype(np.int64)[:-1]


def _split_classes(
    kind: str,
    samples: Samples,
    num_clients: int,
    rng: np.random.Generator,
    alpha: float,
    min_size: int,
    max_tries: int,
    cap: float,
) -> Clients:
    require_min_size(len(samples), num_clients, min_size)
    by_class = [np.flatnonzero(samples.labels == label) for label in np.unique(samples.labels)]
    sizes_of_classes = [len(indices) for indices in by_class]
    smallest = 0
    # Sizes alone decide whether a draw is taken, so the samples are shuffled once, after it.
    for _ in range(max_tries):
        counts = _draw_counts(sizes_of_classes, num_clients, alpha, cap, rng)
        smallest = max(smallest, int(counts.sum(axis=0).min()))
        if counts.sum(axis=0).min() >= min_size:
            return checked(_deal(by_class, counts, rng), len(samples))
    raise ValueError(
        f"data.partition: {kind} with alpha={alpha} gave none of {max_tries} draws in which each of "
        f"{num_clients} clients has at least min_size={min_size} of {len(samples)} samples "
        f"(best: {smallest}). Raise alpha, lower data.partition.clients or data.partition.min_size, or set "
        "data.partition.type to dirichlet_balanced"
    )


def _draw_counts(
    sizes_of_classes: Sequence[int], num_clients: int, alpha: float, cap: float, rng: np.random.Generator
) -> np.ndarray:
    """One draw of the sizes of all pieces, int64 `[num_classes, num_clients]`."""
    counts = np.zeros((len(sizes_of_classes), num_clients), dtype=np.int64)
    sizes = np.zeros(num_clients, dtype=np.int64)
    for row, num_samples in zip(counts, sizes_of_classes, strict=True):
        shares = capped_shares(_dirichlet(alpha, num_clients, rng), sizes, cap)
        if not shares.any():
            # A tiny alpha puts all on clients that are full. Its limit for the others is one of them at
            # random.
            shares[rng.choice(np.flatnonzero(sizes < cap))] = 1.0
        row[:] = np.diff(cut_points(shares, num_samples), prepend=0, append=num_samples)
        sizes += row
    return counts


def _deal(by_class: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> Clients:
    """Shuffles each class and gives every client its count."""
    pieces = [
        np.split(rng.permutation(indices), np.cumsum(row)[:-1]) for indices, row in zip(by_class, counts, strict=True)
    ]
    return [np.concatenate(client_pieces) for client_pieces in zip(*pieces, strict=True)]


def _draw_weighted(
    candidates: np.ndarray, prior: np.ndarray, labels: np.ndarray, size: int, rng: np.random.Generator
) -> np.ndarray:
    """`size` of the candidates without replacement, weighted by their class's prior.

    When fewer have a weight above zero, all of those and the rest uniformly from the others.
    """
    weights = prior[labels[candidates]]
    total = weights.sum()
    possible = np.flatnonzero(weights / total > 0) if total > 0 else np.empty(0, dtype=np.int64)
    if len(possible) > size:
        weights = weights[possible]
        return candidates[rng.choice(possible, size, replace=False, p=weights / weights.sum())]
    others = np.delete(candidates, possible)
    return np.concatenate([candidates[possible], rng.choice(others, size - len(possible), replace=False)])


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """A draw from `Dir(alpha, ..., alpha)`; where it underflows, from its limit, one random corner."""
    shares = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    corner = np.zeros(size)
    corner[rng.integers(size)] = 1.0
    return corner
