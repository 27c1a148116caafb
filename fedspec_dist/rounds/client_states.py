"""What clients keep from one participation to the next: in host memory, each client's on its home rank.

A client's home is rank `client % W`, whichever rank trains it. Its vectors travel to the rank that trains it and back;
a checkpoint holds them by client, so that they can be restored at another number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from fedspec_dist.distributed.collectives import Collectives

# A checkpoint's files of client states, and what travels to rank 0 at a time.
_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Move:
    """A client's state goes from one rank to another; which, every rank knows."""

    client: int
    source: int
    target: int


class ClientStates:
    """A vector `[size]` of every client that has reported before.

    Every rank calls every method, with the same cohort and plan. With size 0 nothing is exchanged.
    """

    def __init__(self, size: int, dtype: torch.dtype, num_clients: int, collectives: Collectives) -> None:
        self.size = size
        self._dtype = dtype
        self._num_clients = num_clients
        self._collectives = collectives
        self._home: dict[int, Tensor] = {}

    def fetch(self, cohort: Sequence[int], plan: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Client -> `[size]` on the CPU, of the clients that this rank trains and that have a state."""
        if not self.size:
            return {}
        known = set(self._known(cohort))
        trainers = [(cohort[p], rank) for rank, positions in enumerate(plan) for p in positions]
        return self._travel([Move(c, self._home_of(c), rank) for c, rank in trainers if c in known], self._home)

    def store(
        self,
        cohort: Sequence[int],
        plan: Sequence[Sequence[int]],
        kept: Collection[int],  # positions in the cohort of the clients that reported
        new: Mapping[int, Tensor],  # client -> [size], of those that this rank trained
    ) -> None:
        """Keep the new states at home."""
        if not self.size:
            return
        trainers = [(cohort[p], rank) for rank, positions in enumerate(plan) for p in positions if p in kept]
        self._home |= self._travel([Move(c, rank, self._home_of(c)) for c, rank in trainers], new)

    def chunks(self) -> Iterator[dict[int, Tensor]]:
        """The states of all clients in ascending order, some at a time: on rank 0, empty elsewhere."""
        if not self.size:
            return
        everyone = self._known(range(self._num_clients))
        together = max(1, _CHUNK_BYTES // (self.size * self._dtype.itemsize))
        for start in range(0, len(everyone), together):
            moves = [Move(client, self._home_of(client), 0) for client in everyone[start : start + together]]
            yield self._travel(moves, self._home)

    def restore(self, chunks: Iterable[Mapping[int, Tensor]]) -> None:
        """Take back what `chunks` gave, at this or another number of ranks; only rank 0's argument is looked at."""
        if not self.size:
            return
        collectives = self._collectives
        for chunk in chunks if collectives.rank == 0 else repeat({}):
            for client, state in chunk.items():
                if state.numel() != self.size:
                    raise ValueError(
                        f"the checkpoint has {state.numel()} numbers of client {client}, but what clients keep in this "
                        f"version has {self.size}; start over with --fresh"
                    )
            ids = torch.zeros(self._num_clients, dtype=torch.uint8)
            ids[list(chunk)] = 1
            ids = collectives.broadcast(ids, "restoring of client states")
            clients = ids.nonzero().reshape(-1).tolist()
            if not clients:  # rank 0 has no more, see below
                return
            self._home |= self._travel([Move(client, 0, self._home_of(client)) for client in clients], chunk)
        collectives.broadcast(torch.zeros(self._num_clients, dtype=torch.uint8), "restoring of client states")

    def at_home(self, client: int) -> Tensor | None:
        """What a client keeps whose home this rank is; None if it has not reported before."""
        return self._home.get(client)

    def _home_of(self, client: int) -> int:
        return client % self._collectives.num_ranks

    def _known(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that have a state."""
        mine = torch.tensor([client in self._home for client in clients], dtype=torch.uint8)
        anybody = self._collectives.all_gather(mine, "gathering of client states").amax(dim=0)
        return [client for client, known in zip(clients, anybody.tolist(), strict=True) if known]

    def _travel(self, moves: Sequence[Move], states: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Carry out the moves from `states`, which every source has; what has arrived here, on the CPU."""
        rank, num_ranks = self._collectives.rank, self._collectives.num_ranks
        nothing = torch.zeros(0, dtype=self._dtype)
        outgoing = [[states[m.client] for m in moves if (m.source, m.target) == (rank, to)] for to in range(num_ranks)]
        incoming = [[m.client for m in moves if (m.source, m.target) == (come, rank)] for come in range(num_ranks)]
        send = [torch.cat([state.reshape(-1).cpu() for state in part]) if part else nothing for part in outgoing]
        received = self._collectives.all_to_all(
            send, [len(part) * self.size for part in incoming], "moving client states"
        )
        return {
            client: state.clone()  # a view would keep what came with it in memory
            for clients, data in zip(incoming, received, strict=True)
            for client, state in zip(clients, data.reshape(-1, self.size), strict=True)
        }
