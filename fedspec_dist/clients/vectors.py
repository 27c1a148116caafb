"""The vectors that a client's local step works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalVectors:
    """All `[..., P]`, of one dtype, on one device; a leading axis is a batch of clients.

    Formulas write into `gradient`, and into `constant`, `own` and `uploads` where they say so. They may use `scratch`,
    whose content they must not rely on from one call to the next.
    """

    parameters: Tensor  # y, the client's own copy
    gradient: Tensor  # of the current batch, already filtered; what the step will use
    anchor: Tensor  # theta, the global model of this round, [P]
    scratch: Tensor
    constant: Tensor  # for what a method works out once per client and adds in every step
    own: Mapping[str, Tensor] = field(default_factory=dict)  # what this client kept since it last took part
    received: Mapping[str, Tensor] = field(default_factory=dict)  # what the server sent beside the model, [P]
    uploads: Mapping[str, Tensor] = field(default_factory=dict)  # what goes to the server beside the update

    @classmethod
    def allocate(
        cls,
        num_parameters: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        own: Sequence[str] = (),
        received: Sequence[str] = (),
        uploads: Sequence[str] = (),
    ) -> LocalVectors:
        def zeros() -> Tensor:
            return torch.zeros(num_parameters, device=device, dtype=dtype)

        named = ({name: zeros() for name in names} for names in (own, received, uploads))
        return cls(zeros(), zeros(), zeros(), zeros(), zeros(), *named)


def add_scaled(vector: Tensor, other: Tensor, factor: float | Tensor) -> Tensor:
    """`vector + factor * other`, in place; the factor is a number, or one for each client, `[C, 1]`."""
    if isinstance(factor, Tensor):
        return vector.add_(other.to(vector.dtype) * factor)
    return vector.add_(other, alpha=factor)
