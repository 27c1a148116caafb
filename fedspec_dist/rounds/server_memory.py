"""The server's methods, and what they remember from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.step import Filter
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.update_matrix import assemble
from fedspec_dist.server.protocols import Aggregator, ServerOptimizer, Transform, Weighting


@dataclass(frozen=True)
class ServerMethods:
    """What happens to a round's matrix, in this order."""

    weighting: Weighting
    aggregator: Aggregator
    algorithm: LocalAlgorithm  # its server half
    filter: Filter | None  # of the aggregated update
    optimizer: ServerOptimizer
    transforms: Sequence[Transform] = ()  # of the updates, once their weights are known


class ServerMemory:
    """Of two kinds: slices of vectors of local method, aggregator and optimizer, each on the rank that owns the
    columns, and small tensors of weighting and transforms, which all ranks that work hold alike. Methods write into
    them.
    """

    def __init__(
        self,
        methods: ServerMethods,
        num_parameters: int,
        columns: Columns,
        collectives: Collectives,
        device: torch.device,
        dtype: torch.dtype,
        num_samples: Sequence[int],  # of all clients
    ) -> None:
        self._columns = columns
        self._collectives = collectives
        size = columns.count(collectives.rank) * columns.width
        algorithm = methods.algorithm
        self.algorithm = {name: torch.zeros(size, dtype=dtype, device=device) for name in algorithm.server}
        self.optimizer = {k: v.to(device) for k, v in methods.optimizer.initial_state(size).items()}
        names = getattr(methods.aggregator, "memory", ())
        self.aggregator = {name: torch.zeros(size, dtype=torch.float64, device=device) for name in names}
        self.weighting = methods.weighting.initial_state(torch.tensor(num_samples, dtype=torch.int64))
        self.transforms = [made.initial_state(len(num_samples)) for made in methods.transforms]
        # What goes to the clients with the model, whole, on every rank.
        self.broadcast = {name: torch.zeros(num_parameters, dtype=dtype, device=device) for name in algorithm.broadcast}

    def share(self) -> None:
        """Let every rank have whole what goes to the clients; all ranks call it."""
        for name, whole in self.broadcast.items():
            whole.copy_(assemble(self.algorithm[name], self._columns, self._collectives))

    def full(self) -> dict[str, Tensor]:
        """Whole vectors, for a checkpoint; all ranks call it."""
        sliced = {name: assemble(part, self._columns, self._collectives) for name, part in self._sliced().items()}
        return sliced | self.small()

    def load(self, full: Mapping[str, Tensor]) -> None:
        """Go on from what `full` gave, at any number of ranks.

        Raises:
            ValueError: other methods, or another version of them, gave it.
        """
        expected = {*self._sliced(), *self.small()}
        if expected != set(full):
            raise ValueError(
                f"the checkpoint has what another version of these methods remembers ({sorted(full)}, not "
                f"{sorted(expected)}); start over with --fresh"
            )
        for name, part in self._sliced().items():
            part.copy_(self._columns.slice(full[name].to(part), self._collectives.rank))
        for name, value in self.small().items():
            value.copy_(full[name])
        for name, whole in self.broadcast.items():
            whole.copy_(full[f"algorithm.{name}"])

    def small(self) -> dict[str, Tensor]:
        families = {"weights": self.weighting}
        families |= {f"transforms.{place}": state for place, state in enumerate(self.transforms)}
        return {f"{family}.{name}": value for family, values in families.items() for name, value in values.items()}

    def _sliced(self) -> dict[str, Tensor]:
        families = {"algorithm": self.algorithm, "aggregator": self.aggregator, "optimizer": self.optimizer}
        return {f"{family}.{name}": part for family, parts in families.items() for name, part in sorted(parts.items())}
