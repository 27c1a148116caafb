"""Partitions in which a client sees few classes ("pathological" ones)."""

from __future__ import annotations

import numpy as np

from .samples import Clients, Samples, checked, require_enough


def shards(samples: Samples, num_clients: int, rng: np.random.Generator, *, shards_per_client: int) -> Clients:
    """Samples sorted by label, cut into shards, each client dealt a few: a client sees few classes.

    B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017, section 3 (the "pathological" split; there 200 shards of 300 for 100 clients).

    Raises:
        ValueError: more shards than samples.
    """
    require_enough(len(samples), num_clients * shards_per_client, "shards", "shards")
    order = rng.permutation(len(samples))
    order = order[np.argsort(samples.labels[order], kind="stable")]
    pieces = np.array_split(order, num_clients * shards_per_client)
    dealt = rng.permutation(len(pieces)).reshape(num_clients, shards_per_client)
    return checked([np.concatenate([pieces[piece] for piece in hand]) for hand in dealt], len(samples))


def pathological(samples: Samples, num_clients: int, rng: np.random.Generator, *, classes_per_client: int) -> Clients:
    """Each client holds exactly `classes_per_client` classes; a class is cut into equal parts for those who hold it.

    Classes have numbers of holders that differ by at most one, and parts of a class sizes that do. Everything is given
    out, except that with `num_clients * classes_per_client` below the number of classes some have no holder and are
    unused. The "Pathological" rule of FL-Simulator, without its reuse of samples.

    Raises:
        ValueError: there are fewer classes than a client is to hold, or fewer samples of a class than holders.
    """
    present = np.unique(samples.labels)
    if classes_per_client > len(present):
        raise ValueError(
            f"data.partition.classes_per_client: {classes_per_client} given; allowed is 1 to {len(present)}, "
            "the number of classes that the training samples have"
        )
    holds = _deal_classes(len(present), num_clients, classes_per_client, rng)
    hands: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label, held in zip(present, holds.T, strict=True):
        indices, holders = np.flatnonzero(samples.labels == label), rng.permutation(np.flatnonzero(held))
        if len(holders) > len(indices):
            raise ValueError(
                f"data.partition: pathological with {num_clients} clients and {classes_per_client} classes_per_client "
                f"gives class {label} to {len(holders)} clients, but it has {len(indices)} samples; lower "
                "data.partition.clients or data.partition.classes_per_client"
            )
        if len(holders):
            for client, piece in zip(holders, np.array_split(rng.permutation(indices), len(holders)), strict=True):
                hands[client].append(piece)
    return checked([np.concatenate(hand) for hand in hands], len(samples), complete=bool(holds.any(axis=0).all()))


def _deal_classes(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Who holds which class, bool `[num_clients, num_classes]`: each client takes those with the fewest holders."""
    holds = np.zeros((num_clients, num_classes), dtype=bool)
    num_holders = np.zeros(num_classes, dtype=np.int64)
    for hand in holds:
        order = rng.permutation(num_classes)  # ties are broken at random
        hand[order[np.argsort(num_holders[order], kind="stable")[:per_client]]] = True
        num_holders += hand
    return holds
