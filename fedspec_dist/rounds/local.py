"""This rank's part of the local training, and what all ranks learn of everybody's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedspec_dist.clients.executors.sequential import largest_entry
from fedspec_dist.config import Config
from fedspec_dist.core import seeding
from fedspec_dist.core.cohort import Clients
from fedspec_dist.core.draws import keyed
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.fisher.sketch import NonFiniteFisherError
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.divergence import NonFiniteModelError, NonFiniteUpdateError
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.sampling import Workload, client_work, send
from fedspec_dist.rounds.server import LocalRows, RoundFacts
from fedspec_dist.rounds.stage import FISHER_DIAGONAL, Stage

log = logging.getLogger(__name__)

# Columns of the table that ranks exchange, before the eigenvalues: what the executor returns, and the sketch's rank.
_LOSS, _ENERGY_REMOVED, _LARGEST, _SKETCH_RANK = range(4)
_NUM_SCALARS = 4


@dataclass
class LocalResult:
    """Rows of this rank's clients, in the order in which they were trained. Nothing here has left the device."""

    updates: Tensor  # [num_local, columns.padded]
    uploads: dict[str, Tensor] = field(default_factory=dict)  # of the same shape each
    scalars: list[Tensor] = field(default_factory=list)  # each [3], see the executor
    sketches: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # eigenvalues [r], rows [r, P]
    states: dict[int, Tensor] = field(default_factory=dict)  # client -> [S, P], what it would keep
    complete: bool = True  # False when a request to stop came in between

    def rows(self, kept: Sequence[int], with_sketches: bool) -> LocalRows:
        """The rows of the clients at the local places `kept`."""
        everybody = len(kept) == len(self.updates)
        updates, uploads = (
            self.updates if everybody else self.updates[list(kept)],
            {name: rows if everybody else rows[list(kept)] for name, rows in self.uploads.items()},
        )
        if not with_sketches:
            return LocalRows(updates, uploads)
        padded = updates.shape[1]
        parts = [self.sketches[place][1] for place in kept]
        sketches = updates.new_zeros(sum(len(part) for part in parts), padded)
        if parts:
            stacked = torch.cat(parts)
            sketches[:, : stacked.shape[1]] = stacked
        return LocalRows(updates, uploads, sketches)


def train_clients(
    config: Config,
    runtime: Runtime,
    federation: Federation,
    stage: Stage,
    theta: Tensor,
    round_index: int,
    work: Sequence[tuple[int, Workload]],  # clients, and how much each will do
    states: Mapping[int, Tensor],  # client -> [S, P], of those that have been here before
) -> LocalResult:
    """Train these clients from `theta`, one after the other; between two clients a request to stop is heeded."""

    def rows() -> Tensor:
        return theta.new_zeros(len(work), stage.columns.padded)

    result = LocalResult(rows(), {name: rows() for name in stage.uploads})
    stage.executor.receive(stage.server.broadcast)
    for place, (client, load) in enumerate(work):
        if runtime.stop:
            result.complete = False
            break
        samples = federation.clients[client]
        batches = client_work(
            config.seed,
            round_index,
            client,
            samples,
            federation.class_counts[client],
            load,
            stage.augmentation,
            runtime.device,
        )
        try:
            # Of the model, if it has dropout, and of whatever a plugin draws in a hook.
            with keyed(runtime.device, config.seed, "client", round_index, client):
                sketched = True
                if stage.sketcher is not None:
                    # The same for all clients, as published.
                    seed = seeding.torch_seed(config.seed, "sketch", round_index)
                    try:
                        result.sketches.append(stage.sketcher.sketch(theta, batches.samples, seed))
                    except NonFiniteFisherError:
                        sketched = False
                        result.sketches.append((theta.new_zeros(0), theta.new_zeros(0, len(theta))))
                update = result.updates[place, : len(theta)]
                sent = {name: table[place, : len(theta)] for name, table in result.uploads.items()}
                own = send(states[client], runtime.device) if client in states else None
                scalars = stage.executor.train(batches, theta, stage.lr(round_index), update, own=own, uploads=sent)
                if stage.states.names:
                    result.states[client] = stage.executor.kept()
                if stage.fisher is not None:
                    sent[FISHER_DIAGONAL].copy_(stage.fisher.diagonal(theta + update, batches.samples))
                    scalars[_LARGEST] = torch.maximum(scalars[_LARGEST], largest_entry(sent[FISHER_DIAGONAL]).double())
                if client in federation.attackers:  # last, so that all else that it sends and keeps is honest
                    stage.attack.spoil(update, seeding.torch_seed(config.seed, "attack", round_index, client))
                    scalars[_LARGEST] = torch.maximum(scalars[_LARGEST], largest_entry(update).double())
                if not sketched:  # told to all ranks like an update that is not finite
                    scalars[_LARGEST] = math.inf
                result.scalars.append(scalars)
        except Exception:
            log.error("client %d failed in round %d on rank %d", client, round_index + 1, runtime.rank)
            raise
    return result


@dataclass(frozen=True)
class CohortReport:
    """What every rank knows after the local training, by position in the cohort."""

    cohort: Sequence[int]
    plan: Sequence[Sequence[int]]
    clients: Clients  # of the whole cohort
    scalars: Tensor  # [K, _NUM_SCALARS] float64, on the CPU
    eigenvalues: Sequence[Tensor]  # [r_k] each
    stopped: bool

    def finite(self, policy: str, round_number: int, server_fault: Callable[[], str] = str) -> list[int]:
        """Positions of the clients all of whose results are finite.

        `server_fault` says, when somebody's are not, why the model that they were given is to blame, if it is.

        Raises:
            NonFiniteUpdateError: with policy `raise`, when there are others.
            NonFiniteModelError: the same, and no client could have trained this model.
        """
        largest = self.scalars[:, _LARGEST].tolist()
        bad = [position for position, value in enumerate(largest) if not math.isfinite(value)]
        if bad and policy == "raise":
            if fault := server_fault():
                raise NonFiniteModelError(f"no client can train in round {round_number}: {fault}", round_number)
            rank = next(rank for rank, positions in enumerate(self.plan) if bad[0] in positions)
            raise NonFiniteUpdateError(
                f"client {self.cohort[bad[0]]} returned a non-finite update in round {round_number} (rank {rank}"
                f"{f'; {len(bad) - 1} more clients did' if len(bad) > 1 else ''}). Lower local.lr, set "
                "local.clip_norm, or drop such clients with runtime.on_nonfinite=skip",
                round_number,
            )
        return [position for position in range(len(self.cohort)) if position not in bad]

    def facts(self, kept: Sequence[int]) -> RoundFacts:
        """The kept clients, renumbered."""
        place = {position: number for number, position in enumerate(kept)}
        return RoundFacts(
            clients=self.clients.select(kept),
            owners=[[place[p] for p in positions if p in place] for positions in self.plan],
            eigenvalues=[self.eigenvalues[position] for position in kept],
        )

    def metrics(self, kept: Sequence[int]) -> dict[str, float | int | None]:
        """Means over clients: of their mean losses, and of the energy removed from their first gradient."""
        means = self.scalars[list(kept)].mean(dim=0).tolist() if kept else [None] * _NUM_SCALARS
        record: dict[str, float | int | None] = {
            "train_loss": means[_LOSS],
            "filter/energy_removed": means[_ENERGY_REMOVED],
        }
        if len(kept) < len(self.cohort):
            record["clients_skipped"] = len(self.cohort) - len(kept)
        return record


def share_results(
    result: LocalResult,
    cohort: Sequence[int],
    clients: Clients,
    plan: Sequence[Sequence[int]],
    max_rank: int,
    collectives: Collectives,
) -> CohortReport:
    """One table with a row per client and rank, gathered by all: `max_rank` is the most eigenvalues of a client."""
    height = max(len(positions) for positions in plan) + 1
    table = torch.zeros(height, _NUM_SCALARS + max_rank, dtype=torch.float64, device=result.updates.device)
    table[0, 0] = float(not result.complete)
    for place, values in enumerate(result.scalars):
        table[place + 1, :_SKETCH_RANK] = values
    for place, (eigenvalues, _) in enumerate(result.sketches):
        table[place + 1, _SKETCH_RANK] = len(eigenvalues)
        table[place + 1, _NUM_SCALARS : _NUM_SCALARS + len(eigenvalues)] = eigenvalues
    tables = collectives.all_gather(table, "gathering of client results").cpu()
    rows = torch.zeros(len(cohort), table.shape[1], dtype=torch.float64)
    for rank, positions in enumerate(plan):
        rows[list(positions)] = tables[rank, 1 : len(positions) + 1]
    ranks = rows[:, _SKETCH_RANK].int().tolist()
    spectra = [row[_NUM_SCALARS : _NUM_SCALARS + rank] for row, rank in zip(rows, ranks, strict=True)]
    return CohortReport(cohort, plan, clients, rows[:, :_NUM_SCALARS], spectra, bool(tables[:, 0, 0].any()))
