"""The server's part of a round, spread over the ranks: exchange, aggregate, step, gather the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.update_matrix import UpdateMatrix, assemble, exchange
from fedspec_dist.server.cohort import Aggregator, Cohort, Sketches
from fedspec_dist.server.optimizers import Sgd


@dataclass(frozen=True)
class LocalRows:
    """What this rank brings: updates of its clients and, for aggregators that ask, their sketches."""

    updates: Tensor  # [num_local_clients, columns.padded]
    sketches: Tensor | None = None  # [sum of local ranks, columns.padded], client after client


@dataclass(frozen=True)
class RoundFacts:
    """What every rank knows of a round's surviving clients, in ascending order of client id."""

    num_samples: Sequence[int]
    owners: Sequence[Sequence[int]]  # rank -> positions of its clients, in the order in which it holds their rows
    eigenvalues: Sequence[Tensor] = field(default_factory=list)  # per client, [r_m] float64; with sketches only


class FederatedServer:
    """One step of the global model from the ranks' rows.

    `sharded`: every rank works on its own column blocks. `gather`: rank 0 gets all of them and works alone, the others
    wait for the model. The blocks are the same, so both give the same bits.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        weighting: Callable[[Tensor], Tensor],
        optimizer: Sgd,
        columns: Columns,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self.aggregator = aggregator
        self._weighting = weighting
        self._optimizer = optimizer
        self.columns = columns
        self._collectives = collectives
        # A single owner of all blocks needs nobody's help; see Columns.gathered.
        self._alone = collectives.num_ranks > 1 and columns.count(0) == columns.num_blocks
        self._matrix_collectives: Collectives = SingleProcess() if self._alone else collectives
        self._matrix_columns = (
            Columns(columns.num_columns, columns.width, columns.owners[:1]) if self._alone else columns
        )
        self.state = optimizer.initial_state(columns.count(collectives.rank) * columns.width)
        self._device = device

    def exchange(self, rows: LocalRows, facts: RoundFacts) -> Cohort | None:
        """The round as aggregators see it; None on ranks that only wait (`gather`)."""
        blocks = exchange(rows.updates, facts.owners, self.columns, self._collectives)
        sketch_blocks = None
        if rows.sketches is not None:
            sketch_blocks = exchange(rows.sketches, _sketch_owners(facts), self.columns, self._collectives)
        if self._alone and self._collectives.rank:
            return None
        weights = self._weighting(torch.tensor(facts.num_samples, dtype=torch.float64)).to(self._device)
        return Cohort(self._matrix(blocks), weights, self._sketches(sketch_blocks, facts))

    def step(self, theta: Tensor, cohort: Cohort | None) -> tuple[Tensor, dict[str, float]]:
        """The next model `[P]` on every rank, and the aggregator's diagnostics (empty on ranks that wait)."""
        part, diagnostics = theta.new_zeros(0), {}
        if cohort is not None:
            direction = self.aggregator.direction(cohort)
            diagnostics = dict(direction.diagnostics)
            part = self.columns.slice(theta, self._collectives.rank)
            part = self._optimizer.step(part, direction.slice, self.state)
        return assemble(part, self.columns, self._collectives), diagnostics

    def full_state(self) -> dict[str, Tensor]:
        """The server's state as whole vectors, for a checkpoint; every rank calls it."""
        return {name: assemble(part, self.columns, self._collectives) for name, part in sorted(self.state.items())}

    def load_state(self, full: dict[str, Tensor]) -> None:
        for name, part in self.state.items():
            part.copy_(self.columns.slice(full[name].to(part), self._collectives.rank))

    def _matrix(self, blocks: Tensor) -> UpdateMatrix:
        return UpdateMatrix(blocks, self._matrix_columns, self._matrix_collectives)

    def _sketches(self, blocks: Tensor | None, facts: RoundFacts) -> Sketches | None:
        if blocks is None:
            return None
        owners = [torch.full((len(values),), client) for client, values in enumerate(facts.eigenvalues)]
        return Sketches(
            self._matrix(blocks),
            torch.cat(list(facts.eigenvalues)).to(self._device),
            torch.cat(owners).to(self._device),
        )


def _sketch_owners(facts: RoundFacts) -> list[list[int]]:
    """For each rank, the places of its clients' eigenvectors among all of them, stacked in client order."""
    ends = torch.tensor([len(values) for values in facts.eigenvalues]).cumsum(0).tolist()
    starts = [end - len(values) for end, values in zip(ends, facts.eigenvalues, strict=True)]
    return [[row for client in clients for row in range(starts[client], ends[client])] for clients in facts.owners]
