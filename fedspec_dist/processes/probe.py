"""How fast the ranks talk: latency and bandwidth of the collectives of a round, and how far the clocks are apart."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedspec_dist.distributed.collectives import CollectiveError, Collectives, ProcessGroup, _all_gather_single, finish

_SMALL_REPEATS, _LARGE_REPEATS = 20, 3
_CLOCK_REPEATS = 9
_OWN_END_S = 3.0  # beyond the time limit, for a thread that sees it by itself


_Run = Callable[[Tensor, Any], tuple[Any, Tensor, float]]
_Complete = Callable[[Any], None]


@dataclass(frozen=True)
class Speed:
    """Of one collective: the median over repeats of the time until the slowest rank was done."""

    name: str
    latency_us: float  # a few bytes to each rank
    megabytes_s: float  # that each rank sent to others, per second, with large messages


def gather_texts(collectives: Collectives, text: str) -> list[str]:
    """One text of each rank, of any length, by rank."""
    encoded = text.encode()
    sizes = collectives.all_gather(torch.tensor([len(encoded)]), "gathering of texts").reshape(-1).tolist()
    data = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    rows = collectives.all_gather(data, "gathering of texts")
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def barrier(collectives: Collectives, what: str) -> None:
    collectives.all_gather(torch.zeros(1), what)


def clock_offsets_s(collectives: Collectives) -> list[float]:
    """How far each rank's clock is ahead of rank 0's, to about the latency of a collective."""
    times = []
    for _ in range(_CLOCK_REPEATS):
        barrier(collectives, "comparison of clocks")
        now = torch.tensor([time.time()], dtype=torch.float64)
        times.append(collectives.all_gather(now, "comparison of clocks").reshape(-1))
    return torch.stack([row - row[0] for row in times]).median(dim=0).values.tolist()


def measure(
    collectives: ProcessGroup, backend: str, device: torch.device, num_bytes: int, timeout_s: float
) -> list[Speed]:
    """The speed of the backend between all ranks, with `num_bytes` from each rank in the large messages.

    In a thread of its own: a backend that cannot connect the ranks may never return from trying.

    Raises:
        CollectiveError: it did not work, took longer than `timeout_s`, or gave wrong values.
    """
    outcome: list[list[Speed] | Exception] = []

    def work() -> None:
        try:
            outcome.append(_measure(backend, device, num_bytes, time.monotonic() + timeout_s))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="fedspec-probe", daemon=True)
    thread.start()
    thread.join(timeout_s + _OWN_END_S)
    collectives.stuck |= thread.is_alive()
    result = outcome[0] if outcome else RuntimeError(f"not connected after {timeout_s:.0f} s")
    if isinstance(result, RuntimeError):
        rank = collectives.rank
        raise CollectiveError(f"rank {rank}: {backend} does not work between the ranks: {result}") from result
    if isinstance(result, Exception):
        raise result
    return result


def _measure(backend: str, device: torch.device, num_bytes: int, deadline: float) -> list[Speed]:
    num_ranks = dist.get_world_size()
    where = device if backend == "nccl" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)  # threads do not inherit it
    # name, how to run it, and what a rank sends: its message as many times
    kinds = (
        ("all-to-all", _all_to_all, (num_ranks - 1) / num_ranks),
        ("all-gather", _all_gather, num_ranks - 1),
        ("all-reduce", _all_reduce, 2 * (num_ranks - 1) / num_ranks),
    )
    speeds = []
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=max(deadline - time.monotonic(), 1)))

    def complete(work: Any) -> None:
        finish(work, where, lambda: "no answer in time" if time.monotonic() > deadline else "")

    for name, run, share in kinds:
        latency = _seconds(run, 1, where, group, complete, _SMALL_REPEATS)
        large = _seconds(run, num_bytes // 4, where, group, complete, _LARGE_REPEATS)
        speeds.append(Speed(name, 1e6 * latency, share * num_bytes / 1e6 / large))
    return speeds


def _seconds(run: _Run, size: int, where: torch.device, group: Any, complete: _Complete, n: int) -> float:
    """The median time of the slowest rank for float32 messages of about `size`, after one that connects the ranks."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    size = max(1, round(size / num_ranks)) * num_ranks
    sent = torch.full((size,), float(rank + 1), device=where)
    times, wrong = [], 0
    for _ in range(n + 1):
        complete(dist.barrier(group, async_op=True))
        began = time.monotonic()
        work, received, expected = run(sent, group)
        complete(work)
        times.append(time.monotonic() - began)
        wrong += float(received.sum(dtype=torch.float64)) != expected * size
    slowest = torch.tensor([wrong, *times[1:]], device=where)
    complete(dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group, async_op=True))
    if slowest[0]:
        raise RuntimeError("wrong values arrive")
    return statistics.median(slowest[1:].tolist())


# Each starts, and returns where it receives, and what that will add up to for each number sent, rank r sending r + 1.


def _all_to_all(sent: Tensor, group: Any) -> tuple[Any, Tensor, float]:
    received = torch.empty_like(sent)
    return (
        dist.all_to_all_single(received, sent, group=group, async_op=True),
        received,
        _total() / dist.get_world_size(),
    )


def _all_gather(sent: Tensor, group: Any) -> tuple[Any, Tensor, float]:
    gathered = sent.new_empty(dist.get_world_size() * len(sent))
    return _all_gather_single(gathered, sent, group=group, async_op=True), gathered, _total()


def _all_reduce(sent: Tensor, group: Any) -> tuple[Any, Tensor, float]:
    total = sent.clone()
    return dist.all_reduce(total, group=group, async_op=True), total, _total()


def _total() -> float:
    return dist.get_world_size() * (dist.get_world_size() + 1) / 2
