"""How much each client of a cohort counts: `num_samples [K] -> weights [K]`, float64, summing to 1."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(num_samples: Tensor) -> Tensor:
    """`1 / K` for every client, however many samples it has.

    Raises:
        ValueError: the cohort is empty.
    """
    _require_clients(num_samples)
    return torch.full(num_samples.shape, 1 / num_samples.numel(), dtype=torch.float64, device=num_samples.device)


def samples(num_samples: Tensor) -> Tensor:
    """`n_k / sum_j n_j`.

    Raises:
        ValueError: the cohort is empty, a count is negative, or all are zero.
    """
    _require_clients(num_samples)
    counts = num_samples.to(torch.float64)
    if bool((counts < 0).any()) or not bool(counts.sum() > 0):
        raise ValueError(
            f"server.weights: samples needs counts >= 0 with at least one sample in the cohort, got {counts.tolist()}"
        )
    return counts / counts.sum()


def _require_clients(num_samples: Tensor) -> None:
    if num_samples.numel() == 0:
        raise ValueError("server.weights: the cohort has no clients")
