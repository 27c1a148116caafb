"""This rank's part of the local training, and what all ranks learn of everybody's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspec_dist.clients.executors.base import ClientReport, ClientWork, Rows, Sent, largest_entry
from fedspec_dist.config import Config
from fedspec_dist.core import seeding
from fedspec_dist.core.cohort import Clients
from fedspec_dist.core.draws import keyed
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.divergence import NonFiniteModelError, NonFiniteUpdateError
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.sampling import Workload
from fedspec_dist.rounds.server import LocalRows, RoundFacts
from fedspec_dist.rounds.stage import Stage

log = logging.getLogger(__name__)

# Columns of the table that ranks exchange, before the eigenvalues: the numbers of a report, and the sketch's rank.
_LOSS, _ENERGY_REMOVED, _LARGEST, _SKETCH_RANK = range(4)
_NUM_SCALARS = 4


@dataclass(frozen=True)
class LocalResult:
    """Of this rank's clients, in the order in which they were trained. Nothing here has left the device."""

    rows: Rows
    reports: Sequence[ClientReport]
    states: Mapping[int, Tensor]  # client -> what it would keep
    complete: bool = True  # False when a request to stop came in between

    def of(self, kept: Sequence[int], with_sketches: bool) -> LocalRows:
        """The rows of the clients at the local places `kept`."""
        everybody = len(kept) == len(self.rows.updates)

        def chosen(table: Tensor) -> Tensor:
            return table if everybody else table[list(kept)]

        updates = chosen(self.rows.updates)
        uploads = {name: chosen(table) for name, table in self.rows.uploads.items()}
        short = {name: chosen(table) for name, table in self.rows.short.items()}
        buffers = None if self.rows.buffers is None else chosen(self.rows.buffers)
        if not with_sketches:
            return LocalRows(updates, uploads, short, buffers=buffers)
        parts = [self.rows.sketches[place][1] for place in kept]
        sketches = updates.new_zeros(sum(len(part) for part in parts), updates.shape[1])
        if parts:
            stacked = torch.cat(parts)
            sketches[:, : stacked.shape[1]] = stacked
        return LocalRows(updates, uploads, short, sketches, buffers)


def train_clients(
    config: Config,
    runtime: Runtime,
    federation: Federation,
    stage: Stage,
    sent: Sent,
    work: Sequence[tuple[int, Workload]],  # clients, and how much each will do
    states: Mapping[int, Tensor],  # client -> what it kept, of those that have been here before
) -> LocalResult:
    """Train these clients from what they are sent; between two clients a request to stop is heeded."""
    rows, round_index = stage.rows(len(work)), sent.round_index
    at_work: list[int] = []

    def clients() -> Iterator[ClientWork]:
        for client, load in work:
            at_work.append(client)
            yield stage.work(round_index, client, load, states.get(client))

    try:
        reports = stage.executor.train(sent, clients(), rows, lambda: bool(runtime.stop))
    except Exception:
        if at_work:
            log.error("client %d failed in round %d on rank %d", at_work[-1], round_index + 1, runtime.rank)
        raise
    for place, report in enumerate(reports):
        client = work[place][0]
        if client in federation.attackers:  # last, so that all else that it sends and keeps is honest
            update = rows.updates[place, : stage.layout.num_shared]
            with keyed(runtime.device, config.seed, "client's attack", round_index, client):
                stage.attack.spoil(update, seeding.torch_seed(config.seed, "attack", round_index, client))
            reports[place] = report.with_largest(largest_entry(update))
    kept = {client: report.kept for (client, _), report in zip(work, reports, strict=False)}
    states = {client: state for client, state in kept.items() if state is not None}
    return LocalResult(rows, reports, states, complete=len(reports) == len(work))


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
    table = torch.zeros(height, _NUM_SCALARS + max_rank, dtype=torch.float64, device=result.rows.updates.device)
    table[0, 0] = float(not result.complete)
    for place, report in enumerate(result.reports):
        table[place + 1, :_SKETCH_RANK] = report.numbers
    for place, (eigenvalues, _) in enumerate(result.rows.sketches):
        table[place + 1, _SKETCH_RANK] = len(eigenvalues)
        table[place + 1, _NUM_SCALARS : _NUM_SCALARS + len(eigenvalues)] = eigenvalues
    tables = collectives.all_gather(table, "gathering of client results").cpu()
    rows = torch.zeros(len(cohort), table.shape[1], dtype=torch.float64)
    for rank, positions in enumerate(plan):
        rows[list(positions)] = tables[rank, 1 : len(positions) + 1]
    ranks = rows[:, _SKETCH_RANK].int().tolist()
    spectra = [row[_NUM_SCALARS : _NUM_SCALARS + rank] for row, rank in zip(rows, ranks, strict=True)]
    return CohortReport(cohort, plan, clients, rows[:, :_NUM_SCALARS], spectra, bool(tables[:, 0, 0].any()))
