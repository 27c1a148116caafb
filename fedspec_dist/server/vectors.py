"""Sums over whole vectors, which every rank has and none needs another for."""

from __future__ import annotations

from math import fsum

import torch
from torch import Tensor

# Torch gives longer sums to several threads, in as many pieces; the last bits then depend on the number of threads.
_CHUNK = 16384


def inner(left: Tensor, right: Tensor) -> float:
    """`left . right` for vectors `[P]`, in float64 and with the same bits at any number of ranks and threads."""
    parts = [(a.double() * b.double()).sum() for a, b in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True)]
    return fsum(torch.stack(parts).tolist()) if parts else 0.0
