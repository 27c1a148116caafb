"""The collectives that the project uses, for many processes and for one.

Every rank calls every method, with shapes that all ranks know. `bytes_sent` counts what this rank sent to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fedspec_dist.failures import Kind

# torch 2.14 renamed it; both take (output, input).
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(RuntimeError):
    """A collective failed because another rank is gone or late."""

    kind = Kind.RANK_LOST


class Collectives(Protocol):
    rank: int
    num_ranks: int
    bytes_sent: int

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        """`[*shape]`, equal on all ranks -> `[num_ranks, *shape]`."""

    def all_to_all(self, send: Sequence[Tensor], receive_sizes: Sequence[int], what: str) -> list[Tensor]:
        """One flat tensor for each rank, of one dtype -> one flat tensor from each rank."""

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Tensor:
        """The source's values on every rank; `tensor` gives shape and dtype elsewhere."""


class SingleProcess:
    """One process: nothing moves."""

    rank = 0
    num_ranks = 1
    bytes_sent = 0

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        return tensor.unsqueeze(0)

    def all_to_all(self, send: Sequence[Tensor], receive_sizes: Sequence[int], what: str) -> list[Tensor]:
        return list(send)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Tensor:
        return tensor


class ProcessGroup:
    """The default process group. `transport` is the device its backend can send from (gloo: the CPU)."""

    def __init__(self, transport: torch.device) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.bytes_sent = 0
        self.current = ""  # the collective that this rank is in, for other threads to see
        self._transport = transport

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        sent = self._stage(tensor)
        gathered = sent.new_empty((self.num_ranks * sent.numel(),))
        with self._named(what):
            _all_gather_single(gathered, sent.reshape(-1))
        self.bytes_sent += _bytes(sent) * (self.num_ranks - 1)
        return gathered.reshape(self.num_ranks, *tensor.shape).to(tensor.device)

    def all_to_all(self, send: Sequence[Tensor], receive_sizes: Sequence[int], what: str) -> list[Tensor]:
        sizes = [part.numel() for part in send]
        packed = self._stage(torch.cat([part.reshape(-1) for part in send]))
        received = packed.new_empty((sum(receive_sizes),))
        with self._named(what):
            dist.all_to_all_single(received, packed, list(receive_sizes), sizes)
        self.bytes_sent += _bytes(packed) - _bytes(send[self.rank])
        return list(received.to(send[0].device).split(list(receive_sizes)))

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Tensor:
        sent = self._stage(tensor)
        with self._named(what):
            dist.broadcast(sent, source)
        if self.rank == source:
            self.bytes_sent += _bytes(sent) * (self.num_ranks - 1)
        return sent.to(tensor.device)

    def _stage(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._transport).contiguous()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        self.current = what
        try:
            yield
            if self._transport.type == "cuda":
                # NCCL returns before it is done: wait here, where a failure has a name. A few times a round.
                torch.cuda.synchronize(self._transport)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} lost contact with the other ranks during {what}: {error}"
            ) from error  # and stays `current`: this is where the rank was
        self.current = ""


def ordered_sum(partials: Tensor, counts: Sequence[int], collectives: Collectives, what: str) -> Tensor:
    """The sum of all ranks' `partials [counts[rank], n]` in block order, the same bits on every rank.

    Each rank sums a share of the n entries over all blocks, then the shares are gathered: a sum whose order depends
    on the blocks alone, where an all_reduce would add in an order that depends on the number of ranks.
    """
    num_entries = partials.shape[1]
    share = -(-num_entries // collectives.num_ranks)
    padded = torch.nn.functional.pad(partials, (0, share * collectives.num_ranks - num_entries))
    send = [part.reshape(-1) for part in padded.split(share, dim=1)] if share else []
    if not share:
        return partials.new_zeros(0)
    received = collectives.all_to_all(send, [count * share for count in counts], what)
    total = partials.new_zeros(share)
    for block in torch.cat(received).reshape(-1, share):
        total += block
    return collectives.all_gather(total, what).reshape(-1)[:num_entries]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
