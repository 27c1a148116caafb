"""The collectives that the project uses, for many processes and for one.

Every rank calls every method, with shapes that all ranks know. `bytes_sent` counts what this rank sent to others.

No rank ever blocks in the backend. A collective is started and then polled from here, over gloo and NCCL alike: NCCL
has no word for a peer that is gone, and waits for it without end; gloo's own limit knows nothing of a peer that works.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fedspec_dist.core.failures import Kind

# torch 2.14 renamed it; both take (output, input).
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A small collective is over in about the time that the kernel takes to wake a thread: at first this one only lets
# others run, the backend's before all. Then a pause is a small part of the time waited so far, and so is what it adds.
_YIELD_S = 150e-6
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 30e-6, 2e-3
_LOOK_AROUND_S = 0.05  # between two looks at how the other ranks are


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
    """The default process group. `transport` is the device its backend can send from (gloo: the CPU).

    `trouble` says why to give up a collective in which this rank has been since a time of `time.monotonic`; empty: go
    on waiting.
    """

    def __init__(self, transport: torch.device, trouble: Callable[[float], str] = lambda since: "") -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.bytes_sent = 0
        self.current = ""  # the collective that this rank is in, for other threads to see
        self.stuck = False  # a call into the backend does not return: nor would its clean end
        self._transport = transport
        self._trouble = trouble

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        sent = self._stage(tensor)
        gathered = sent.new_empty((self.num_ranks * sent.numel(),))
        self._run(what, lambda: _all_gather_single(gathered, sent.reshape(-1), async_op=True))
        self.bytes_sent += _bytes(sent) * (self.num_ranks - 1)
        return gathered.reshape(self.num_ranks, *tensor.shape).to(tensor.device)

    def all_to_all(self, send: Sequence[Tensor], receive_sizes: Sequence[int], what: str) -> list[Tensor]:
        sizes = [part.numel() for part in send]
        packed = self._stage(torch.cat([part.reshape(-1) for part in send]))
        received = packed.new_empty((sum(receive_sizes),))
        self._run(what, lambda: dist.all_to_all_single(received, packed, list(receive_sizes), sizes, async_op=True))
        self.bytes_sent += _bytes(packed) - _bytes(send[self.rank])
        return list(received.to(send[0].device).split(list(receive_sizes)))

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Tensor:
        sent = self._stage(tensor)
        self._run(what, lambda: dist.broadcast(sent, source, async_op=True))
        if self.rank == source:
            self.bytes_sent += _bytes(sent) * (self.num_ranks - 1)
        return sent.to(tensor.device)

    def _stage(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._transport).contiguous()

    def _run(self, what: str, begin: Callable[[], Any]) -> None:
        since = time.monotonic()
        self.current = what
        try:
            finish(begin(), self._transport, lambda: self._trouble(since))
        except RuntimeError as error:
            # Of a peer that was ended for a reason the backend knows only that it is gone.
            reason = self._trouble(since) or error
            raise CollectiveError(
                f"rank {self.rank} lost contact with the other ranks during {what}: {reason}"
            ) from error  # and stays `current`: this is where the rank was
        self.current = ""


def finish(work: Any, device: torch.device, trouble: Callable[[], str]) -> None:
    """Wait for a collective that was started with `async_op=True`.

    Raises:
        RuntimeError: it failed, or `trouble` has said why not to wait any longer.
    """
    _poll(work.is_completed, trouble)
    work.wait()  # raises what went wrong on gloo
    if device.type == "cuda":
        # NCCL calls complete what has failed, too, and `wait` was a word to the stream alone: only the stream knows.
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        _poll(done.query, trouble)


def _poll(is_done: Callable[[], bool], trouble: Callable[[], str]) -> None:
    began = looked = time.monotonic()
    while not is_done():
        now = time.monotonic()
        if now - looked > _LOOK_AROUND_S:
            looked = now
            if reason := trouble():
                raise RuntimeError(reason)
        if now - began < _YIELD_S:
            os.sched_yield()
        else:
            time.sleep(min(max(_PAUSE_SHARE * (now - began), _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))


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


def checksum(values: Iterable[Tensor | float | str], start: int = 0) -> int:
    """32 bits of small results that every rank works out, to find out whether all have the same."""
    for value in values:
        found = (
            value.detach().cpu().contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        )
        start = zlib.crc32(found, start)
    return start


def bits_sum(vector: Tensor) -> int:
    """The same of a long vector, where it lies: the sum of its bits, read as numbers, whose order does not matter."""
    return int(vector.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)) % 2**32


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
