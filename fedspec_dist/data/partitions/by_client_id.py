"""The partition that the data came with."""

from __future__ import annotations

import numpy as np

from .samples import Clients, Samples, checked


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
