"""The vectors that a client's local step works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Names of vectors as long as the model; or a width for each name, None for these.
Uploads = Sequence[str] | Mapping[str, int | None]


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
    # What goes to the server beside the update, zeros when a client begins; short vectors are [..., width].
    uploads: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        num_parameters: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        own: Sequence[str] = (),
        received: Sequence[str] = (),
        uploads: Uploads = (),
    ) -> LocalVectors:
        def zeros(width: int | None = None) -> Tensor:
            return torch.zeros(num_parameters if width is None else width, device=device, dtype=dtype)

        return cls(
            *(zeros(), zeros(), zeros(), zeros(), zeros()),
            own={name: zeros() for name in own},
            received={name: zeros() for name in received},
            uploads={name: zeros(width) for name, width in widths(uploads).items()},
        )


def widths(uploads: Uploads) -> dict[str, int | None]:
    """Of what a local method sends beside the update, how many numbers; None: as many as the model has."""
    return dict(uploads) if isinstance(uploads, Mapping) else dict.fromkeys(uploads)


def add_scaled(vector: Tensor, other: Tensor, factor: float | Tensor) -> Tensor:
    """`vector + factor * other`, in place; the factor is a number, or one for each client, `[C, 1]`."""
    if isinstance(factor, Tensor):
        return vector.add_(other.to(vector.dtype) * factor)
    return vector.add_(other, alpha=factor)
