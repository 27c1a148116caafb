"""What an executor is given and gives back: the words between the round's loop and those who train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedspec_dist.clients.step import Ranges
from fedspec_dist.core.batch import Batch


@dataclass(frozen=True)
class Sent:
    """What the clients of a round are sent, and start from."""

    theta: Tensor  # [P]: the global model, of which a client replaces what it keeps
    lr: float
    round_index: int  # from 0
    seed: int  # of the run
    vectors: Mapping[str, Tensor] = field(default_factory=dict)  # of the local method, [P_shared] each
    buffers: Tensor | None = None  # [size], of a model that has moving ones


@dataclass(frozen=True)
class ClientWork:
    """One client's local training: which samples, in which order, cut into which batches.

    Every random draw of ours was made outside, so the same work gives the same result on any rank. What the model or a
    plugin draws besides comes from global generators, which are keyed by seed, round and client.
    """

    client: int
    samples: Tensor  # [n] int64, the client's positions in the training set, on the device
    order: Tensor  # [number seen] int64, positions in the training set, on the device
    bounds: Sequence[tuple[int, int]]  # of the batches, within `order`
    draws: Tensor | None  # [number seen, 3], of the augmentation
    class_counts: Tensor  # [C] int64, of the client's samples, on the device
    filter_seed: int  # of this client in this round
    state: Tensor | None = None  # what it kept, see `Kept`; None if it has not reported before
    ranges: Sequence[Ranges] | None = None  # of each batch; None: everything trains in all of them


@dataclass
class Rows:
    """Where n clients' results go, row by row, on the device."""

    updates: Tensor  # [n, padded], of what is shared
    uploads: Mapping[str, Tensor] = field(default_factory=dict)  # [n, padded] each
    short: Mapping[str, Tensor] = field(default_factory=dict)  # [n, width] float64 each
    buffers: Tensor | None = None  # [n, number averaged]
    sketches: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of each client: eigenvalues [r], rows [r, P]


@dataclass(frozen=True)
class ClientReport:
    """How a client fared. The numbers are on the device, where nobody has waited for them yet."""

    numbers: Tensor  # [3] float64, see the properties
    kept: Tensor | None = None  # what it would keep, see `Kept`

    @classmethod
    def of(cls, loss: Tensor, energy_removed: Tensor, largest: Tensor, kept: Tensor | None = None) -> ClientReport:
        return cls(torch.stack([loss, energy_removed, largest]).double(), kept)

    @property
    def loss(self) -> Tensor:
        """The mean over the samples that it saw."""
        return self.numbers[0]

    @property
    def energy_removed(self) -> Tensor:
        """By the filter, the share of the first gradient's."""
        return self.numbers[1]

    @property
    def largest(self) -> Tensor:
        """The largest entry of all that it sends or keeps; not finite when any of them is not."""
        return self.numbers[2]

    def with_largest(self, *values: Tensor) -> ClientReport:
        """The same for a client that also sends something with these largest entries."""
        largest = torch.stack([self.largest, *(value.double() for value in values)]).amax()
        return replace(self, numbers=torch.stack([self.loss, self.energy_removed, largest]))


@dataclass(frozen=True)
class Kept:
    """What clients keep, as one vector: the local method's own vectors, then parameters, then buffers."""

    num_vectors: int  # of the local method, [P] each
    num_parameters: int  # P
    ranges: Sequence[tuple[int, int]] = ()  # of the vector, that clients keep
    num_buffers: int = 0

    @property
    def size(self) -> int:
        in_ranges = sum(stop - start for start, stop in self.ranges)
        return self.num_vectors * self.num_parameters + in_ranges + self.num_buffers

    def unpack(self, state: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Own vectors `[S, P]`, the parameters of each range, and buffers, as views."""
        lengths = [stop - start for start, stop in self.ranges]
        own, *parts, buffers = state.split([self.num_vectors * self.num_parameters, *lengths, self.num_buffers])
        return own.view(self.num_vectors, self.num_parameters), parts, buffers

    def pack(self, own: Iterable[Tensor], parameters: Tensor, buffers: Tensor) -> Tensor:
        parts = [parameters[start:stop] for start, stop in self.ranges]
        return torch.cat([*own, *parts, buffers[: self.num_buffers]])

    def place(self, state: Tensor, parameters: Tensor) -> None:
        """Write the parameters that a client keeps into the vector `[P]`."""
        for (start, stop), part in zip(self.ranges, self.unpack(state)[1], strict=True):
            parameters[start:stop].copy_(part)


class Statistics(Protocol):
    """What a method wants of clients besides their training. Both give the largest entries of what they found."""

    def before(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        """With the model as the client starts from it."""

    def after(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        """With the model as the client leaves it."""


BatchOf = Callable[[Tensor, Tensor | None], Batch]  # index [B], draws [B, 3] or None


class Executor(Protocol):
    """Trains a rank's clients of a round."""

    def train(self, sent: Sent, work: Iterable[ClientWork], rows: Rows, stop: Callable[[], bool]) -> list[ClientReport]:
        """Write each client's results into its row. Between two clients `stop` is asked; if it says so, the others
        are left out: reports are then fewer than clients."""

    def show(self, theta: Tensor, buffers: Tensor | None) -> None:
        """Let the module have the parameters `[P]`, and the buffers, until the next call."""


def largest_entry(vector: Tensor) -> Tensor:
    """The largest absolute value, a scalar; 0 of nothing, NaN where there is a NaN."""
    if not vector.numel():
        return vector.new_zeros(())
    low, high = torch.aminmax(vector)
    return torch.maximum(-low, high)
