"""The matrix of a round, distributed by columns, and the exchange that makes it from rows.

A rank trains whole clients, so it holds whole rows; an aggregator needs, for its slice of the P columns, all rows.
One all-to-all turns the one into the other. All arithmetic is done block by block (see `columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspec_dist.core.cohort import RowMatrix
from fedspec_dist.core.draws import keyed_parts
from fedspec_dist.distributed.collectives import Collectives, checksum, ordered_sum
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.tsqr import TallQR

# Their sum stays in the cache, and torch does not yet spread the addition over threads.
_COMBINED_COLUMNS = 16384
# Of a large matrix product, so many entries are summed over the blocks at a time: each block has all of them.
_SUMMED_ENTRIES = 2**22


class UpdateMatrix:
    """`num_rows x P`, column-distributed; every rank that owns columns calls every method.

    `blocks [num_local_blocks, num_rows, width]` float32 are this rank's columns. Results without a column axis are
    float64, on the CPU and the same bits on every rank; results with one are this rank's slice,
    `[num_local_blocks * width]` float64.
    """

    def __init__(self, blocks: Tensor, columns: Columns, collectives: Collectives) -> None:
        self._blocks = blocks
        self._columns = columns
        self._collectives = collectives
        self._qr: TallQR | None = None
        self.num_rows = blocks.shape[1]
        self.checksum = 0  # of the coefficients that it was given, which have to be the same on all ranks

    def gram(self) -> Tensor:
        """`U U^T`, `[K, K]`."""
        return self.inner(self)

    def inner(self, other: RowMatrix) -> Tensor:
        """`U W^T`, `[K, R]`, for another matrix with the same columns."""
        if not isinstance(other, UpdateMatrix):
            return other.inner(self).T
        together = max(1, _SUMMED_ENTRIES // max(other.num_rows, 1))
        parts = []
        for start in range(0, max(self.num_rows, 1), together):
            pairs = zip(self._blocks[:, start : start + together], other._blocks, strict=True)
            partials = [mine.double() @ theirs.double().T for mine, theirs in pairs]
            parts.append(self._sum(partials, (min(together, self.num_rows - start), other.num_rows)))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def combine(self, coefficients: Tensor) -> Tensor:
        """Slice of `sum_k coefficients[k] u_k`, rows added in order (on a GPU: in its matrix product's, per block)."""
        self._remember(coefficients)
        total = self.zeros()
        if total.is_cuda:  # one kernel a block; a launch for each row of each would cost more than the sums
            coefficients = coefficients.to(total.device)
            for block, out in zip(self._blocks, total.reshape(-1, self._columns.width), strict=True):
                torch.mv(block.double().T, coefficients, out=out)
            return total
        # Small blocks together, so that a call has enough to do. An entry's sum has the same order either way.
        together = max(1, _COMBINED_COLUMNS // self._columns.width)
        blocks, scalars = self._blocks.split(together), coefficients.tolist()
        for some, out in zip(blocks, total.reshape(-1, self._columns.width).split(together), strict=True):
            for row, coefficient in zip(some.unbind(1), scalars, strict=True):
                out.add_(row, alpha=coefficient)
        return total

    def dot(self, vector_slice: Tensor) -> Tensor:
        """`U v` for a vector of which each rank gives its slice, `[K]`."""
        parts = vector_slice.double().reshape(-1, self._columns.width)
        partials = [block.double() @ part for block, part in zip(self._blocks, parts, strict=True)]
        return self._sum(partials, (self.num_rows,))

    def norms(self) -> Tensor:
        """Euclidean norm of each row, `[K]`."""
        partials = [block.double().square().sum(dim=1) for block in self._blocks]
        return self._sum(partials, (self.num_rows,)).sqrt()

    def segment_grams(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """`U_s U_s^T` for the columns `start <= j < stop` of each of L segments, `[L, K, K]`."""
        return self._over_segments(bounds, lambda part, _: part @ part.T, (self.num_rows, self.num_rows))

    def segment_dots(self, bounds: Sequence[tuple[int, int]], vector_slice: Tensor) -> Tensor:
        """`U_s v_s` for each of L segments and a vector of which each rank gives its slice, `[L, K]`."""
        vector = vector_slice.double()
        return self._over_segments(bounds, lambda part, inside: part @ vector[inside], (self.num_rows,))

    def segment_squares(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """The squared norm of each row within each of L segments, `[L, K]`."""
        return self._over_segments(bounds, lambda part, _: part.square().sum(1), (self.num_rows,))

    def columnwise(self, function: Callable[..., Tensor], *others: RowMatrix) -> Tensor:
        """Slice of `function(U, *others)`, called on float64 blocks `[K, width]`, the last one padded with zeros."""
        matrices = [self._blocks]
        for other in others:
            assert isinstance(other, UpdateMatrix)
            matrices.append(other._blocks)
        result = self.zeros()
        first, stop = self._columns.owners[self._collectives.rank]
        with keyed_parts(result.device, first, stop - first) as parts:
            for _, out, *blocks in zip(parts, result.reshape(-1, self._columns.width), *matrices, strict=True):
                out.copy_(function(*(block.double() for block in blocks)))
        return result

    def qr_r(self) -> Tensor:
        """`R [K, K]` of the thin QR of the transpose (P x K), by TSQR over the blocks."""
        return self._factor().r.cpu()

    def combine_q(self, coefficients: Tensor) -> Tensor:
        """Slice of `Q z`, Q the orthonormal factor that belongs to `qr_r`."""
        self._remember(coefficients)
        return self._factor().combine(coefficients)

    def zeros(self) -> Tensor:
        """The slice of a zero vector."""
        return torch.zeros(len(self._blocks) * self._columns.width, dtype=torch.float64, device=self._blocks.device)

    def _remember(self, coefficients: Tensor) -> None:
        self.checksum = checksum([coefficients], self.checksum)

    def _factor(self) -> TallQR:
        if self._qr is None:
            self._qr = TallQR(self._blocks, self._columns, self._collectives)
        return self._qr

    def _sum(self, partials: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        local = torch.stack(partials).reshape(len(partials), size) if partials else self.zeros().new_zeros(0, size)
        counts = [self._columns.count(rank) for rank in range(self._collectives.num_ranks)]
        return ordered_sum(local, counts, self._collectives, "sum over column blocks").reshape(shape).cpu()

    def _over_segments(
        self, bounds: Sequence[tuple[int, int]], function: Callable[[Tensor, slice], Tensor], size: tuple[int, ...]
    ) -> Tensor:
        """The sum over each segment's columns of `function(columns [K, n] in float64, their place in the slice)`.

        Every piece of a segment that lies in one block goes to every rank, which adds them in block order: little to
        send, since a block meets few segments.
        """
        pieces = [self._pieces(bounds, *owned) for owned in self._columns.owners]
        results = self._blocks.new_zeros(max(map(len, pieces)), *size, dtype=torch.float64)
        rank, width = self._collectives.rank, self._columns.width
        first, _ = self._columns.owners[rank]
        for place, (_, block, inside) in enumerate(pieces[rank]):
            start = (block - first) * width
            in_slice = slice(start + inside.start, start + inside.stop)
            results[place] = function(self._blocks[block - first][:, inside].double(), in_slice)
        gathered = self._collectives.all_gather(results, "gathering of sums over segments").cpu()
        total = torch.zeros(len(bounds), *size, dtype=torch.float64)
        for theirs, found in zip(pieces, gathered, strict=True):
            for result, (segment, _, _) in zip(found, theirs, strict=False):
                total[segment] += result
        return total

    def _pieces(self, bounds: Sequence[tuple[int, int]], first: int, stop: int) -> list[tuple[int, int, slice]]:
        """What the blocks `first <= block < stop` hold of the segments: segment, block, columns within the block.

        In the order of blocks for every segment.
        """
        width, pieces = self._columns.width, []
        for segment, (start, end) in enumerate(bounds):
            for block in range(max(first, start // width), min(stop, -(-end // width))):
                inside = slice(max(start - block * width, 0), min(end - block * width, width))
                pieces.append((segment, block, inside))
        return pieces


def exchange(
    rows: Tensor,  # [num_local_rows, columns.padded] float32, zero beyond num_columns
    row_owners: Sequence[Sequence[int]],  # for each rank, the global positions of its rows, in the order it holds them
    columns: Columns,
    collectives: Collectives,
) -> Tensor:
    """All rows of this rank's column blocks: `[num_local_blocks, num_rows, width]`, rows in global order."""
    rank, width = collectives.rank, columns.width
    local = rows.reshape(rows.shape[0], columns.num_blocks, width)
    send = [local[:, start:stop].transpose(0, 1).reshape(-1) for start, stop in columns.owners]
    num_mine = columns.count(rank)
    sizes = [num_mine * len(positions) * width for positions in row_owners]
    received = collectives.all_to_all(send, sizes, "exchange of updates")
    num_rows = sum(len(positions) for positions in row_owners)
    blocks = rows.new_empty(num_mine, num_rows, width)
    for part, positions in zip(received, row_owners, strict=True):
        if positions:
            index = torch.tensor(positions, device=rows.device)
            blocks[:, index] = part.reshape(num_mine, len(positions), width)
    return blocks


def gather_rows(rows: Tensor, owners: Sequence[Sequence[int]], collectives: Collectives) -> Tensor:
    """Short rows, `[num_local_rows, n]` on each rank, in the order of all rows: `[K, n]`, on every rank.

    `owners` says for each rank the places of its rows among all of them, in the order in which it holds them.
    """
    most = max(len(places) for places in owners)
    padded = rows.new_zeros(most, rows.shape[1])
    padded[: len(rows)] = rows
    gathered = collectives.all_gather(padded, "gathering of short rows")
    result = rows.new_zeros(sum(len(places) for places in owners), rows.shape[1])
    for rank, places in enumerate(owners):
        result[list(places)] = gathered[rank, : len(places)]
    return result


def assemble(part: Tensor, columns: Columns, collectives: Collectives) -> Tensor:
    """The whole vector `[P]` on every rank from the slices that the owners hold."""
    counts = [columns.count(rank) for rank in range(collectives.num_ranks)]
    longest = max(counts) * columns.width
    padded = torch.nn.functional.pad(part, (0, longest - part.numel()))
    if sum(count > 0 for count in counts) == 1:  # one rank owns all: the others only listen
        return collectives.broadcast(padded, "broadcast of the model", counts.index(max(counts)))[: columns.num_columns]
    gathered = collectives.all_gather(padded, "gathering of the model")
    parts = [gathered[rank, : count * columns.width] for rank, count in enumerate(counts)]
    return torch.cat(parts)[: columns.num_columns]


@dataclass(frozen=True)
class ColumnSlicing:
    """The slices of the ranks that work on a round's matrix."""

    columns: Columns
    collectives: Collectives

    def slice(self, vector: Tensor) -> Tensor:
        """This rank's slice, padded with zeros to whole blocks, of `vector [P]`."""
        return self.columns.slice(vector, self.collectives.rank)

    def whole(self, vector_slice: Tensor) -> Tensor:
        """The vector `[P]`, on every rank, of which each gives its slice."""
        return assemble(vector_slice, self.columns, self.collectives)

    def rows(self, slices: Tensor) -> UpdateMatrix:
        """The matrix of R vectors of which each rank gives its slices, `[R, n]`, float64."""
        blocks = slices.reshape(len(slices), -1, self.columns.width).transpose(0, 1)
        return UpdateMatrix(blocks, self.columns, self.collectives)

    def draw(self, block: Callable[[int, int], Tensor]) -> Tensor:
        """This rank's slice of a vector that is made block by block; padding is zero."""
        first, stop = self.columns.owners[self.collectives.rank]
        made = [block(number, self.columns.width) for number in range(first, stop)]
        part = torch.cat(made) if made else torch.zeros(0, dtype=torch.float64)
        part[max(0, self.columns.num_columns - first * self.columns.width) :] = 0
        return part
