"""Draws from the global generators of torch, numpy and python, keyed by what they are for, without a trace outside.

Our own methods draw from generators of their own (`seeding`). A model with dropout or a method of a plugin draws from
the global ones; inside `keyed` it gets the same numbers on any rank and after any resume.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedspec_dist.core import seeding


@contextmanager
def keyed(device: torch.device, seed: int, purpose: str, *key: int) -> Iterator[None]:
    """All global generators start from `(seed, purpose, *key)`, and afterwards from where they were before.

    Of GPUs, only the generator of `device` is looked at.
    """
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        _start_from(device, seeding.torch_seed(seed, purpose, *key))
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


@contextmanager
def keyed_parts(device: torch.device, first: int, count: int) -> Iterator[Iterator[int]]:
    """Inside `keyed`: an iterator over the numbers of parts of a whole, which other ranks have other parts of.

    Each part has draws of its own, whoever works on it; what comes after the parts draws alike on all ranks.
    """
    base = seeding.torch_seed(torch.initial_seed(), "parts")

    def numbers() -> Iterator[int]:
        for number in range(first, first + count):
            _start_from(device, (base + 1 + number) % 2**63)
            yield number

    yield numbers()
    _start_from(device, base)


def _start_from(device: torch.device, value: int) -> None:
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)
