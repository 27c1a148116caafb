"""The server's arithmetic: aggregators (one file per paper), client weights and server optimizers.

An aggregator maps a `Cohort` (the round's updates, weights and sketches) to a `Direction`. It sees matrices only
through the `RowMatrix` protocol, so the same formula runs on one dense tensor and on columns spread over ranks.
Imported from here: `torch`, `numpy` and L1 folders; never `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable

from fedspec_dist.server.cohort import Aggregator
from fedspec_dist.server.fedavg import FedAvg
from fedspec_dist.server.fedgh import FedGH
from fedspec_dist.server.fipa import Fipa

AGGREGATORS: dict[str, Callable[..., Aggregator]] = {"fedavg": FedAvg, "fedgh": FedGH, "fipa": Fipa}
