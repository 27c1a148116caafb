"""The distributed matrix against dense arithmetic, and its bits at different numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.update_matrix import UpdateMatrix, assemble, exchange
from tests.distributed.harness import run_ranks

# 5000 columns are five blocks of 1024: 3 ranks do not divide them, 8 ranks leave three without any.
NUM_ROWS, NUM_COLUMNS = 7, 5000


def _rows(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def _owners(num_rows: int, num_ranks: int) -> list[list[int]]:
    """Uneven, out of order, and with a rank without rows whenever there are three."""
    owners: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in reversed(range(num_rows)):
        owners[0 if num_ranks < 3 or row % 4 == 0 else 2 + row % (num_ranks - 2)].append(row)
    return owners


def _matrix(rows: Tensor, columns: Columns, collectives: Collectives) -> UpdateMatrix:
    owners = _owners(len(rows), collectives.num_ranks)
    mine = owners[collectives.rank]
    padded = torch.zeros(len(mine), columns.padded)
    padded[:, : rows.shape[1]] = rows[mine]
    return UpdateMatrix(exchange(padded, owners, columns, collectives), columns, collectives)


def _all_operations(
    collectives: Collectives, num_rows: int, num_columns: int, gathered: bool = False
) -> dict[str, Any]:
    rows, others = _rows(num_rows, num_columns), _rows(3, num_columns, seed=1)
    columns = (Columns.gathered if gathered else Columns.shared)(num_columns, collectives.num_ranks, num_rows)
    matrix, other = _matrix(rows, columns, collectives), _matrix(others, columns, collectives)
    coefficients = torch.linspace(-1, 2, num_rows, dtype=torch.float64)
    combined = matrix.combine(coefficients)
    z = torch.linspace(1, 2, len(matrix.qr_r()), dtype=torch.float64)
    return {
        "gram": matrix.gram(),
        "inner": matrix.inner(other),
        "norms": matrix.norms(),
        "dot": matrix.dot(combined),
        "combine": assemble(combined, columns, collectives),
        "qr_r": matrix.qr_r(),
        "combine_q": assemble(matrix.combine_q(z), columns, collectives),
        "doubled": matrix.map_rows(lambda block: 2 * block).gram(),
    }


@pytest.fixture(scope="module")
def one_process() -> dict[str, Tensor]:
    return _all_operations(SingleProcess(), NUM_ROWS, NUM_COLUMNS)


def test_operations_equal_dense_arithmetic(one_process: dict[str, Tensor]) -> None:
    rows, others = _rows(NUM_ROWS, NUM_COLUMNS).double(), _rows(3, NUM_COLUMNS, seed=1).double()
    combined = torch.linspace(-1, 2, NUM_ROWS, dtype=torch.float64) @ rows
    q, r = torch.linalg.qr(rows.T)
    signs = r.diagonal().sign()
    expected = {
        "gram": rows @ rows.T,
        "inner": rows @ others.T,
        "norms": torch.linalg.vector_norm(rows, dim=1),
        "combine": combined,
        "dot": rows @ combined,
        "qr_r": signs[:, None] * r,
        "combine_q": q @ (signs * torch.linspace(1, 2, NUM_ROWS, dtype=torch.float64)),
        "doubled": 4 * rows @ rows.T,
    }
    assert expected.keys() == one_process.keys()
    for name, value in expected.items():
        torch.testing.assert_close(one_process[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_same_bits_at_any_number_of_ranks(num_ranks: int, tmp_path: Path, one_process: dict[str, Tensor]) -> None:
    for results in run_ranks(_all_operations, num_ranks, tmp_path, NUM_ROWS, NUM_COLUMNS):
        for name, value in one_process.items():
            assert torch.equal(results[name], value), name


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (5, 3), (1, 1025), (40, 33)])
def test_odd_shapes(num_rows: int, num_columns: int, tmp_path: Path) -> None:
    alone = _all_operations(SingleProcess(), num_rows, num_columns)
    rows = _rows(num_rows, num_columns).double()
    torch.testing.assert_close(alone["gram"], rows @ rows.T)
    torch.testing.assert_close(alone["qr_r"].T @ alone["qr_r"], rows @ rows.T)
    for results in run_ranks(_all_operations, 2, tmp_path, num_rows, num_columns):
        for name, value in alone.items():
            assert torch.equal(results[name], value), name


def test_qr_refuses_nan() -> None:
    columns = Columns.shared(4, 1)
    blocks = torch.full((1, 2, 16), float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        UpdateMatrix(blocks, columns, SingleProcess()).qr_r()


def _bytes_of_exchange(collectives: Collectives) -> int:
    columns = Columns.shared(2048, 2)
    exchange(torch.zeros(1, 2048), [[0], [1]], columns, collectives)
    return collectives.bytes_sent


def test_bytes_count_what_goes_to_other_ranks(tmp_path: Path) -> None:
    # Each of two ranks keeps one of its row's two blocks and sends the other: 1024 floats.
    assert run_ranks(_bytes_of_exchange, 2, tmp_path) == [4096, 4096]


def test_a_combination_has_the_same_bits_however_many_blocks_a_rank_owns() -> None:
    # 40 blocks, of which `combine` takes 16 at a time.
    width = 1024
    blocks = torch.randn(40, NUM_ROWS, width, generator=torch.Generator().manual_seed(5))
    coefficients = torch.linspace(-0.3, 0.4, NUM_ROWS, dtype=torch.float64)

    def combined(some: Tensor) -> Tensor:
        columns = Columns(len(some) * width, width, ((0, len(some)),))
        return UpdateMatrix(some, columns, SingleProcess()).combine(coefficients)

    whole = combined(blocks)
    assert torch.equal(whole, torch.cat([combined(block) for block in blocks.split(1)]))
    assert torch.equal(whole, torch.cat([combined(block) for block in blocks.split(13)]))
    expected = torch.einsum("bkw,k->bw", blocks.double(), coefficients).reshape(-1)
    torch.testing.assert_close(whole, expected)
