"""Where a round's time went, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedspec_dist.distributed.collectives import Collectives

# "wait": for the slowest rank's training.
LAPS = ("train", "wait", "exchange", "aggregate", "eval")


@dataclass
class Clock:
    """Seconds between laps, by name. On a GPU each lap waits for the device, so that a time is the work's own."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LAPS, 0.0))
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._last = self.started

    def lap(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now


@dataclass(frozen=True)
class RoundTotals:
    """`metrics` of all ranks together, whether any of them was asked to stop, and the checks `[num_ranks, n]`."""

    metrics: dict[str, float]
    stopped: bool
    checks: Tensor


def share_totals(
    clock: Clock, bytes_sent: int, stopped: bool, checks: Sequence[int], collectives: Collectives
) -> RoundTotals:
    """The slowest rank's seconds, all ranks' bytes, and max over mean of the training times (1 is perfect balance).

    `checks` travel along: numbers below 2^53 of which all ranks should have the same.
    """
    seconds = time.perf_counter() - clock.started
    mine = [*clock.seconds.values(), float(bytes_sent), float(stopped), seconds, *map(float, checks)]
    table = torch.tensor(mine, dtype=torch.float64)
    gathered = collectives.all_gather(table, "end of the round")
    slowest = gathered.max(dim=0).values.tolist()
    train = gathered[:, 0]
    metrics = {"seconds_round": slowest[len(LAPS) + 2]}
    metrics |= {f"seconds_{name}": slowest[place] for place, name in enumerate(LAPS)}
    metrics["rank_imbalance"] = float(train.max() / train.mean()) if train.max() > 0 else 1.0
    metrics["bytes_exchanged"] = int(gathered[:, len(LAPS)].sum())
    return RoundTotals(metrics, bool(slowest[len(LAPS) + 1]), gathered[:, len(LAPS) + 3 :])
