"""The vectors that a client's local step works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalVectors:
    """All `[..., P]`, of one dtype, on one device; a leading axis is a batch of clients.

    Formulas write into `gradient` and may use `scratch`, whose content they must not rely on.
    """

    parameters: Tensor  # y, the client's own copy
    gradient: Tensor  # of the current batch, already filtered; what the step will use
    anchor: Tensor  # theta, the global model of this round, [P]
    scratch: Tensor

    @classmethod
    def allocate(cls, num_parameters: int, device: torch.device, dtype: torch.dtype = torch.float32) -> LocalVectors:
        return cls(*(torch.zeros(num_parameters, device=device, dtype=dtype) for _ in range(4)))


class LocalAlgorithm(Protocol):
    """A local method: what it adds to the filtered data gradient before clipping, weight decay and the step."""

    def correct(self, vectors: LocalVectors) -> None: ...
