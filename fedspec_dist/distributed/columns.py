"""How the P columns of a round's matrices are cut into blocks, and which rank owns which block."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# 16 floats are 64 bytes: every block, and every row of a block, starts on a cache line, so vectorised kernels
# treat each block alike wherever it lies.
_ALIGNMENT = 16
_TARGET_BLOCKS = 64
_MIN_WIDTH, _MAX_WIDTH = 1024, 65536


def block_width(num_columns: int, total_rank: int = 0) -> int:
    """Columns per block: about 64 blocks, and twice as tall as wide for a QR of `total_rank` columns.

    A function of the problem only, never of the number of ranks: arithmetic done block by block then has the same
    shapes, and so the same bits, at every number of ranks.
    """
    width = min(max(-(-num_columns // _TARGET_BLOCKS), _MIN_WIDTH), _MAX_WIDTH)
    width = min(max(width, 2 * total_rank), max(num_columns, 1))
    return -(-width // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Columns:
    """`num_columns` cut into blocks of `width`; `owners[rank]` is the half-open range of blocks of a rank.

    The last block is padded with zeros to the full width.
    """

    num_columns: int
    width: int
    owners: tuple[tuple[int, int], ...]

    @classmethod
    def shared(cls, num_columns: int, num_ranks: int, total_rank: int = 0) -> Columns:
        """Blocks dealt out evenly, in order."""
        width = block_width(num_columns, total_rank)
        count = -(-num_columns // width)
        cuts = [rank * count // num_ranks for rank in range(num_ranks + 1)]
        return cls(num_columns, width, tuple(pairwise(cuts)))

    @classmethod
    def gathered(cls, num_columns: int, num_ranks: int, total_rank: int = 0) -> Columns:
        """All blocks on rank 0."""
        width = block_width(num_columns, total_rank)
        count = -(-num_columns // width)
        return cls(num_columns, width, ((0, count), *[(count, count)] * (num_ranks - 1)))

    @property
    def num_blocks(self) -> int:
        return max(stop for _, stop in self.owners)

    @property
    def padded(self) -> int:
        """Columns including the padding of the last block."""
        return self.num_blocks * self.width

    def count(self, rank: int) -> int:
        start, stop = self.owners[rank]
        return stop - start

    def slice(self, vector: Tensor, rank: int) -> Tensor:
        """A copy of the rank's part of `vector [P]`, padded to whole blocks: `[count * width]`."""
        start, stop = self.owners[rank]
        part = torch.zeros((stop - start) * self.width, dtype=vector.dtype, device=vector.device)
        inside = vector[start * self.width : min(stop * self.width, self.num_columns)]
        part[: inside.numel()] = inside
        return part
