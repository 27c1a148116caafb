"""Thin QR of a tall matrix whose rows are distributed (TSQR; J. Demmel, L. Grigori, M. Hoemmen, J. Langou, 2012).

Each block has a QR of its own; the R factors, stacked in block order, have one more, which every rank computes. The
result depends on the blocks and not on which rank owns them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.core.failures import NonFiniteError
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.distributed.columns import Columns


class TallQR:
    """`V = Q R` for `V [P, K]` given as `blocks [num_local_blocks, K, width]` of its transpose.

    `r [K, K]` is float64, upper triangular with a non-negative diagonal (QR is unique only up to signs), and the
    same on every rank. With P < K it is `[P', K]`, P' being the padded number of rows.

    Raises:
        ValueError: the matrix holds a NaN or an infinity (LAPACK and cuSOLVER then differ in what they return).
    """

    def __init__(self, blocks: Tensor, columns: Columns, collectives: Collectives) -> None:
        _require_finite(blocks)
        factors = [torch.linalg.qr(block.double().T) for block in blocks]
        self._local_q = [q for q, _ in factors]
        stacked = _gather([r for _, r in factors], blocks, columns, collectives)
        top_q, r = torch.linalg.qr(stacked)
        signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
        self.r = signs[:, None] * r
        self._top_q = top_q * signs
        self._width = columns.width
        self._first_row = columns.owners[collectives.rank][0] * min(columns.width, blocks.shape[1])

    def combine(self, coefficients: Tensor) -> Tensor:
        """This rank's slice of `Q z` for `z = coefficients [K]`, float64."""
        row, coefficients = self._first_row, coefficients.to(self._top_q.device)
        parts = []
        for q in self._local_q:
            parts.append(q @ (self._top_q[row : row + q.shape[1]] @ coefficients))
            row += q.shape[1]
        return torch.cat(parts) if parts else coefficients.new_zeros(0)


def _gather(local: list[Tensor], blocks: Tensor, columns: Columns, collectives: Collectives) -> Tensor:
    """The R factors of all blocks, stacked in block order: `[num_blocks * min(width, K), K]`."""
    num_columns = blocks.shape[1]
    height = min(columns.width, num_columns)
    counts = [columns.count(rank) for rank in range(collectives.num_ranks)]
    padded = torch.zeros(max(counts), height, num_columns, dtype=torch.float64, device=blocks.device)
    for place, factor in enumerate(local):
        padded[place] = factor
    gathered = collectives.all_gather(padded, "gathering of R factors")
    return torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)]).reshape(-1, num_columns)


def _require_finite(blocks: Tensor) -> None:
    if not torch.isfinite(blocks).all():
        raise NonFiniteError("QR of a matrix with NaN or infinite entries")
