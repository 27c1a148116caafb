"""The server's part of a round, spread over the ranks: exchange, weigh, aggregate, step, gather the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedspec_dist.core import seeding
from fedspec_dist.core.cohort import Clients, Cohort, Direction, Proxy, Sketches
from fedspec_dist.core.draws import keyed, keyed_parts
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.distributed.collectives import Collectives, SingleProcess, bits_sum, checksum
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.update_matrix import ColumnSlicing, UpdateMatrix, assemble, exchange, gather_rows
from fedspec_dist.rounds.divergence import NonFiniteModelError
from fedspec_dist.rounds.server_memory import ServerMemory, ServerMethods
from fedspec_dist.server.protocols import Weights


@dataclass(frozen=True)
class LocalRows:
    """What this rank brings: updates of its clients and what else they were asked for."""

    updates: Tensor  # [num_local_clients, columns.padded]
    uploads: Mapping[str, Tensor] = field(default_factory=dict)  # of the same shape each
    short: Mapping[str, Tensor] = field(default_factory=dict)  # [num_local_clients, width] float64 each
    sketches: Tensor | None = None  # [sum of local ranks, columns.padded], client after client
    buffers: Tensor | None = None  # [num_local_clients, n], that are averaged


@dataclass(frozen=True)
class RoundFacts:
    """What every rank knows of a round's surviving clients, in ascending order of client id."""

    clients: Clients
    owners: Sequence[Sequence[int]]  # rank -> positions of its clients, in the order in which it holds their rows
    eigenvalues: Sequence[Tensor] = field(default_factory=list)  # per client, [r_m] float64; with sketches only


class FederatedServer:
    """One step of the global model from the ranks' rows.

    `sharded`: every rank works on its own column blocks. `gather`: rank 0 gets all of them and works alone, the others
    wait for the model. The blocks are the same, so both give the same bits.
    """

    def __init__(
        self,
        methods: ServerMethods,
        layout: ParameterLayout,
        columns: Columns,
        collectives: Collectives,
        device: torch.device,
        num_samples: Sequence[int],  # of all clients
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        proxy: Callable[[int, Collectives], Proxy] | None = None,  # of a round
        test_class_counts: Tensor | None = None,  # [C]
    ) -> None:
        self._methods = methods
        self._layout = layout
        self.columns = columns
        self._collectives = collectives
        self._seed = seed
        self._proxy = proxy
        self._test_class_counts = test_class_counts
        # A single owner of all blocks needs nobody's help; see Columns.gathered.
        self._alone = collectives.num_ranks > 1 and columns.count(0) == columns.num_blocks
        self._matrix_collectives: Collectives = SingleProcess() if self._alone else collectives
        self._matrix_columns = (
            Columns(columns.num_columns, columns.width, columns.owners[:1]) if self._alone else columns
        )
        self.memory = ServerMemory(methods, len(layout), columns, collectives, device, dtype, num_samples)
        self._matrices: list[UpdateMatrix] = []
        self._checksum: int | None = None
        self._buffer_rows: Tensor | None = None
        self.buffers: Tensor | None = None  # the mean of those that the clients of the last step sent, on every rank

    def exchange(self, rows: LocalRows, facts: RoundFacts, theta: Tensor) -> Cohort | None:
        """The round as the methods see it; None on ranks that only wait (`gather`)."""
        self._matrices = []
        blocks = {
            name: exchange(part, facts.owners, self.columns, self._collectives)
            for name, part in {"": rows.updates, **rows.uploads}.items()
        }
        sketch_blocks = None
        if rows.sketches is not None:
            sketch_blocks = exchange(rows.sketches, _sketch_owners(facts), self.columns, self._collectives)
        short = _gathered(rows.short, facts.owners, self._collectives)
        self._buffer_rows = None
        if rows.buffers is not None:
            self._buffer_rows = gather_rows(rows.buffers, facts.owners, self._collectives)
        if self._alone and self._collectives.rank:
            return None
        updates = self._matrix(blocks.pop(""))
        return Cohort(
            updates,
            facts.clients.shares,
            facts.clients,
            theta,
            ColumnSlicing(self._matrix_columns, self._matrix_collectives),
            self._layout.segments,
            self._sketches(sketch_blocks, facts),
            {**{name: self._matrix(part) for name, part in blocks.items()}, **short},
            test_class_counts=self._test_class_counts,
            seed=self._seed,
            memory=self.memory.aggregator,
        )

    def step(self, theta: Tensor, cohort: Cohort | None, round_index: int) -> tuple[Tensor, dict[str, float]]:
        """The next model `[P]` on every rank, and the methods' diagnostics (empty on ranks that wait).

        Raises:
            NonFiniteModelError: on every rank; nothing has been written yet.
        """
        part = theta.new_zeros(0)
        diagnostics: dict[str, float] = {}
        self._checksum = None
        if cohort is not None:
            with keyed(theta.device, self._seed, "server", round_index):
                part, diagnostics = self._step(cohort, round_index)
        self.memory.share()
        theta = assemble(part, self.columns, self._collectives)
        self.buffers = self._shared_buffers()
        known = (theta, *self.memory.broadcast.values(), *([] if self.buffers is None else [self.buffers]))
        if not all(bool(vector.isfinite().all()) for vector in known):
            raise NonFiniteModelError(
                f"the server's step of round {round_index + 1} is not finite, though what the clients sent is: lower "
                "server.optimizer.lr, or look at server.aggregator and server.weights",
                round_index + 1,
            )
        return theta, diagnostics

    def _shared_buffers(self) -> Tensor | None:
        """Those that the ranks that work have averaged, on all ranks."""
        if self._buffer_rows is None:
            return None
        if not self._alone:
            return self.buffers
        mine = self.buffers if self._collectives.rank == 0 else None
        empty = self._buffer_rows.new_zeros(self._buffer_rows.shape[1])
        return self._collectives.broadcast(empty if mine is None else mine, "broadcast of the buffers")

    def _step(self, cohort: Cohort, round_index: int) -> tuple[Tensor, dict[str, float]]:
        methods = self._methods
        cohort = replace(cohort, round_index=round_index, method="server.weights")
        if self._proxy is not None:
            cohort = replace(cohort, proxy=self._proxy(round_index, self._matrix_collectives))
        weights = methods.weighting.weigh(cohort, self.memory.weighting)
        _require_kind("server.weights", methods.weighting, "weigh", weights, Weights)
        cohort = replace(cohort, weights=weights.values)
        if self._buffer_rows is not None:
            self.buffers = _weighted_mean(self._buffer_rows, weights.values)
        transformed, diagnostics = self._transformed(cohort)
        direction = methods.aggregator.direction(replace(transformed, method="server.aggregator"))
        _require_kind("server.aggregator", methods.aggregator, "direction", direction, Direction)
        step = direction.slice
        if methods.filter is not None:
            whole = cohort.slicing.whole(step)
            methods.filter.prepare(round_index + 1, seeding.torch_seed(self._seed, "server filter", round_index))
            methods.filter(whole)
            step = cohort.slicing.slice(whole)
        step = methods.algorithm.server_step(replace(cohort, method="local.algorithm"), step, self.memory.algorithm)
        part = cohort.slicing.slice(cohort.theta)
        if weights.shrink != 1:
            step = weights.shrink * step + (weights.shrink - 1) * part.double()
        part = self._optimize(part, step)
        diagnostics = {**weights.diagnostics, **diagnostics, **direction.diagnostics}
        told: dict[str, Any] = {**diagnostics, **self.memory.small()}
        used = [matrix.checksum for matrix in self._matrices]
        self._checksum = checksum([weights.values, weights.shrink, *(told[name] for name in sorted(told)), *used])
        return part, diagnostics

    def _transformed(self, cohort: Cohort) -> tuple[Cohort, dict[str, float]]:
        """The round as the aggregator sees it. The local method's server half has the rows as they were received."""
        diagnostics: dict[str, float] = {}
        for place, pair in enumerate(zip(self._methods.transforms, self.memory.transforms, strict=True)):
            transform, state = pair
            transformed = transform.apply(replace(cohort, method=f"server.transforms.{place}"), state)
            cohort = transformed.cohort
            diagnostics |= transformed.diagnostics
        return cohort, diagnostics

    def _optimize(self, theta: Tensor, direction: Tensor) -> Tensor:
        """Block by block, so that what an optimizer draws does not depend on the number of ranks."""
        width = self._matrix_columns.width
        first, stop = self._matrix_columns.owners[self._matrix_collectives.rank]
        result = torch.empty_like(theta)
        with keyed_parts(theta.device, first, stop - first) as parts:
            for place, _ in enumerate(parts):
                block = slice(place * width, (place + 1) * width)
                state = {name: vector[block] for name, vector in self.memory.optimizer.items()}
                given = dict(state)
                result[block] = self._methods.optimizer.step(theta[block], direction[block], state)
                for name, vector in given.items():
                    if state[name] is not vector:  # replaced, where it should have been written into
                        vector.copy_(state[name])
        return result

    def checks(self, theta: Tensor, known: int) -> tuple[int, int]:
        """Numbers that are the same on all ranks, or one of them has gone astray: of the small results of the last
        step (-1 on ranks that only wait, and where there was none), and of the model with what else is `known` alike.
        """
        return -1 if self._checksum is None else self._checksum, checksum([known], bits_sum(theta))

    def _matrix(self, blocks: Tensor) -> UpdateMatrix:
        self._matrices.append(matrix := UpdateMatrix(blocks, self._matrix_columns, self._matrix_collectives))
        return matrix

    def _sketches(self, blocks: Tensor | None, facts: RoundFacts) -> Sketches | None:
        if blocks is None:
            return None
        owners = [torch.full((len(values),), client) for client, values in enumerate(facts.eigenvalues)]
        return Sketches(self._matrix(blocks), torch.cat(list(facts.eigenvalues)), torch.cat(owners))


def _gathered(
    short: Mapping[str, Tensor], owners: Sequence[Sequence[int]], collectives: Collectives
) -> dict[str, Tensor]:
    """Name -> `[K, width]`, on the CPU of every rank, from each rank's rows; all names travel together."""
    if not short:
        return {}
    together = gather_rows(torch.cat(list(short.values()), dim=1), owners, collectives).cpu()
    parts = together.split([rows.shape[1] for rows in short.values()], dim=1)
    return dict(zip(short, parts, strict=True))


def _weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """`sum_k w_k b_k` of `rows [K, n]`, added in order in float64, in their own type."""
    total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
    for row, weight in zip(rows, weights.tolist(), strict=True):
        total += weight * row.double()
    return total.to(rows.dtype)


def _require_kind(key: str, method: object, function: str, result: object, kind: type) -> None:
    """Ours hold this by themselves; a plugin's may not."""
    if not isinstance(result, kind):
        raise ValueError(
            f"{key}: {function}() of {type(method).__name__} gave a {type(result).__name__}; allowed is a "
            f"{kind.__module__}.{kind.__name__}"
        )


def _sketch_owners(facts: RoundFacts) -> list[list[int]]:
    """For each rank, the places of its clients' eigenvectors among all of them, stacked in client order."""
    ends = torch.tensor([len(values) for values in facts.eigenvalues]).cumsum(0).tolist()
    starts = [end - len(values) for end, values in zip(ends, facts.eigenvalues, strict=True)]
    return [[row for client in clients for row in range(starts[client], ends[client])] for clients in facts.owners]
