"""Which client holds which training samples.

Every function is `(samples, num_clients, rng, **parameters) -> one sorted int64 index array a client`. They are pure:
same samples, parameters and generator state, same partition, on every rank. No sample is given twice.
"""

from .by_dirichlet import dirichlet, dirichlet_balanced, dirichlet_uncapped
from .few_classes import pathological, shards
from .label_blind import iid, natural, quantity_skew
from .samples import Clients, Samples, class_counts, target_bins

__all__ = [
    "Clients",
    "Samples",
    "class_counts",
    "dirichlet",
    "dirichlet_balanced",
    "dirichlet_uncapped",
    "iid",
    "natural",
    "pathological",
    "quantity_skew",
    "shards",
    "target_bins",
]
