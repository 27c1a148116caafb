"""What share of a local step the high-pass filter takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.one_client import on_random_images, work_of
from benchmarks.spread import quartiles
from fedspec_dist.clients.algorithms.base import FedAvg
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.step import Filter, LocalMethods
from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.filters.identity import Identity
from fedspec_dist.rounds.sampling import batch_bounds

# A client's first step also measures the filtered energy; more than one keeps that from weighing too much.
_STEPS = 4


def measure_filter(module: nn.Module, batch_size: int, ratio: float, repeats: int) -> dict[str, Any]:
    """Clients of a few steps, trained in turn without and with the filter; and the filter by itself.

    `share` is `1 - without / with` of neighbouring clients; `share_alone` is the time of one call of the filter over
    the time of a step with it. The two measure the same: the first includes what the filter does to the caches, the
    second is far less noisy. All is processor time of this thread, which a busy machine disturbs less.
    """
    layout = ParameterLayout(module)
    high_pass = FILTERS["rfft"].build(layout.segments, ratio=ratio)
    without, filtered = (_one_client(module, kept, batch_size) for kept in (Identity(layout.segments), high_pass))
    gradient = torch.randn(len(layout), generator=torch.Generator().manual_seed(0))
    times = np.array([[_seconds(without), _seconds(filtered), _alone(high_pass, gradient)] for _ in range(repeats + 1)])
    base, full, alone = times[1:].T
    return {
        "num_parameters": len(layout),
        "batch_size": batch_size,
        "ratio": ratio,
        "repeats": repeats,
        "step_ms_without": quartiles(base / _STEPS * 1e3),
        "step_ms_with": quartiles(full / _STEPS * 1e3),
        "filter_ms_alone": quartiles(alone / _STEPS * 1e3),
        "share": quartiles(1 - base / full),
        "share_alone": quartiles(alone / full),
    }


def _one_client(module: nn.Module, kept: Filter, batch_size: int) -> Callable[[], object]:
    module = deepcopy(module)
    num_samples = _STEPS * batch_size
    local = LocalMethods(kept, FedAvg(), LocalSgd(weight_decay=0.001))
    client, labels = on_random_images(module, ParameterLayout(module), local, num_samples)
    everything = torch.arange(num_samples)
    work = work_of(everything, everything, batch_bounds(num_samples, batch_size, 1), labels, 10)
    theta = client.vectors.parameters.clone()
    update = torch.empty_like(theta)
    return lambda: client.train(work, theta, 0.01, update)


def _alone(high_pass: Filter, gradient: Tensor) -> float:
    # The filter is a projection: applied again and again, the gradient neither vanishes nor grows.
    def steps() -> None:
        for _ in range(_STEPS):
            high_pass(gradient)

    return _seconds(steps)


def _seconds(action: Callable[[], object]) -> float:
    started = time.thread_time()
    action()
    return time.thread_time() - started
