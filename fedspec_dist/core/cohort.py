"""A round as the server's methods see it: who reported, what they sent, and how much each of them counts.

These are the only words that local algorithms, weightings and aggregators share. None of them knows ranks: long vectors
come and go as *slices*, and whatever is small is the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedspec_dist.core import seeding
from fedspec_dist.core.parameters import Segment


class RowMatrix(Protocol):
    """A `num_rows x P` matrix `U` whose columns may be spread over ranks.

    Small results (`[K, K]`, `[K, R]`, `[K]`) are float64, on the CPU and the same bits on every rank; long ones are
    this rank's slice of a vector of length P, float64. Every rank calls every method, in the same order. `num_rows` may
    be zero.
    """

    @property
    def num_rows(self) -> int: ...

    def gram(self) -> Tensor:
        """`U U^T`, `[K, K]`."""

    def segment_grams(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """`U_s U_s^T` for the columns `start <= j < stop` of each of L segments, `[L, K, K]`."""

    def segment_dots(self, bounds: Sequence[tuple[int, int]], vector_slice: Tensor) -> Tensor:
        """`U_s v_s` for each of L segments, `[L, K]`, from this rank's slice of `v`."""

    def segment_squares(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """The rows' squared norms within each of L segments, `[L, K]`."""

    def inner(self, other: RowMatrix) -> Tensor:
        """`U O^T`, `[K, R]`, for another matrix `O [R, P]` with the same columns on the same ranks."""

    def combine(self, coefficients: Tensor) -> Tensor:
        """This rank's slice of `sum_k c_k u_k`, rows added in ascending order; `coefficients [K]` float64."""

    def columnwise(self, function: Callable[..., Tensor], *others: RowMatrix) -> Tensor:
        """This rank's slice of `function(U, *others)`, where `function([K, n], ...) -> [n]` treats every column alike.

        The blocks that it is given are float64.
        """

    def dot(self, vector_slice: Tensor) -> Tensor:
        """`U v`, `[K]`, from this rank's slice of `v`."""

    def norms(self) -> Tensor:
        """Euclidean norms of the rows, `[K]`."""

    def qr_r(self) -> Tensor:
        """`R [q, K]`, `q = min(P, K)`, of the thin factorisation `U^T = Q R`."""

    def combine_q(self, z: Tensor) -> Tensor:
        """This rank's slice of `Q z` for `z [q]`, with the `Q` that belongs to `qr_r`."""

    def zeros(self) -> Tensor:
        """This rank's slice of the zero vector."""


class Slicing(Protocol):
    """From whole vectors to slices and back. Every rank calls every method, in the same order."""

    def slice(self, vector: Tensor) -> Tensor:
        """This rank's slice, padded with zeros to whole blocks, of `vector [P]`."""

    def whole(self, vector_slice: Tensor) -> Tensor:
        """The vector `[P]`, on every rank, of which each gives its slice."""

    def rows(self, slices: Tensor) -> RowMatrix:
        """The matrix of R vectors of which each rank gives its slices, `[R, n]`, float64."""

    def draw(self, block: Callable[[int, int], Tensor]) -> Tensor:
        """This rank's slice of a vector that is made block by block: `block(number, width)` gives `[width]`.

        How the columns are cut into blocks does not depend on the number of ranks. Padding is zero.
        """


class Proxy(Protocol):
    """Labelled samples of the server's own, for weights that are learned."""

    def batches(self, epoch: int) -> Sequence[Tensor]:
        """Positions of the samples of each batch; the order is keyed by seed, round and epoch."""

    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        """Of the mean loss over a batch at the parameters `theta [P]`: `[P]`, float32."""


@dataclass(frozen=True)
class Clients:
    """What every rank knows of the K clients that reported, in ascending order of id. All on the CPU."""

    ids: Tensor  # [K] int64
    num_samples: Tensor  # [K] int64
    class_counts: Tensor  # [K, C] int64, of their training samples
    num_steps: Tensor  # [K] int64, local steps of this round
    effective_steps: Tensor  # [K] float64, see LocalAlgorithm.effective_steps
    lr: float  # the local learning rate of this round
    population: int  # N, all clients that may ever take part
    proximal: bool = False  # the local method pulls towards the global model, which its effective steps account for

    @property
    def shares(self) -> Tensor:
        """`n_k / sum_j n_j`, `[K]` float64."""
        counts = self.num_samples.to(torch.float64)
        return counts / counts.sum()

    @property
    def distances(self) -> Tensor:
        """`lr * effective_steps`, `[K]`: how far a constant gradient of length one would have carried each client."""
        return self.lr * self.effective_steps

    def select(self, places: Sequence[int]) -> Clients:
        """The clients at these places."""
        index = torch.tensor(places, dtype=torch.int64)
        rows = ("ids", "num_samples", "class_counts", "num_steps", "effective_steps")
        return replace(self, **{name: getattr(self, name)[index] for name in rows})


@dataclass(frozen=True)
class Sketches:
    """The leading eigenpairs of every client's Fisher matrix, stacked in client order.

    `rows` holds the R eigenvectors as rows, `eigenvalues [R]` is float64, `owners [R]` int64 is the row of the cohort's
    `updates` that each eigenvector belongs to. Clients may have contributed different numbers, or none.
    """

    rows: RowMatrix
    eigenvalues: Tensor
    owners: Tensor


@dataclass(frozen=True)
class Cohort:
    """One round's updates `y_k - theta` (one row a client, in client order) and all that is known beside them."""

    updates: RowMatrix
    weights: Tensor  # [K] float64, on the CPU, summing to 1
    clients: Clients
    theta: Tensor  # [P], the model that the clients were sent
    slicing: Slicing
    segments: Sequence[Segment] = ()  # where each parameter tensor lies in the vector
    sketches: Sketches | None = None
    # What clients sent besides, by name: vectors as long as the model; short ones as [K, width] float64, on the CPU.
    uploads: Mapping[str, RowMatrix | Tensor] = field(default_factory=dict)
    proxy: Proxy | None = None
    test_class_counts: Tensor | None = None  # [C] int64, of the samples that the model is tested on
    seed: int = 0  # of the run; with the round it keys what server methods draw
    round_index: int = 0  # from 0, over all phases
    clip_norm: float | None = None  # to which a transform has clipped the updates
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # the aggregator's, by name: slices, float64
    method: str = ""  # that is at work: the config's key, such as `server.weights` or `server.transforms.0`

    def rows(self, name: str) -> RowMatrix:
        """Of the uploads, one that is as long as the model."""
        found = self._upload(name)
        if isinstance(found, Tensor):
            raise ValueError(
                f"{self.method}: the upload {name!r} is a short one; allowed of it: cohort.short({name!r})"
            )
        return found

    def short(self, name: str) -> Tensor:
        """Of the uploads, a short one: `[K, width]` float64."""
        found = self._upload(name)
        if not isinstance(found, Tensor):
            raise ValueError(f"{self.method}: the upload {name!r} is as long as the model; use cohort.rows({name!r})")
        return found

    def _upload(self, name: str) -> RowMatrix | Tensor:
        if name not in self.uploads:
            raise ValueError(
                f"{self.method}: no client sent {name!r}; there are: {', '.join(self.uploads) or 'none'}. A server's "
                "method names the statistics that it reads in `needs`, a local method what it sends in `uploads`"
            )
        return self.uploads[name]

    def generator(self, purpose: str = "") -> torch.Generator:
        """Draws on the CPU that are the same on every rank, keyed by seed, method, round and purpose.

        Each call starts it anew: draws that are to differ within a round need different purposes.
        """
        name = f"server method {self.method} {purpose}"
        return torch.Generator().manual_seed(seeding.torch_seed(self.seed, name, self.round_index))


@dataclass(frozen=True)
class Direction:
    """This rank's slice, float64, of the vector the server steps along, with scalars worth recording."""

    slice: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)
