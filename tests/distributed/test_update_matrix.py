"""The distributed matrix against dense arithmetic, and its bits at different numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.distributed import update_matrix
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


def _bounds(num_columns: int) -> list[tuple[int, int]]:
    """Within a block, of one column, over blocks, to the end; one overlaps others and one ends where blocks do."""
    third = num_columns // 3
    cuts = [(0, third), (third, third + 1), (third + 1, num_columns), (0, num_columns), (0, min(1024, num_columns))]
    return [(start, stop) for start, stop in cuts if start < stop]


def _spread(rows: Tensor, others: Tensor) -> Tensor:
    assert rows.dtype == others.dtype == torch.float64
    return rows.amax(0) - others.amin(0)


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
        "columnwise": assemble(matrix.columnwise(_spread, other), columns, collectives),
        "segment_grams": matrix.segment_grams(_bounds(num_columns)),
        "segment_dots": matrix.segment_dots(_bounds(num_columns), combined),
        "segment_squares": matrix.segment_squares(_bounds(num_columns)),
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
        "columnwise": rows.max(0).values - others.min(0).values,
        "segment_grams": torch.stack([rows[:, a:b] @ rows[:, a:b].T for a, b in _bounds(NUM_COLUMNS)]),
        "segment_dots": torch.stack([rows[:, a:b] @ combined[a:b] for a, b in _bounds(NUM_COLUMNS)]),
        "segment_squares": torch.stack([rows[:, a:b].square().sum(1) for a, b in _bounds(NUM_COLUMNS)]),
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
    for (start, stop), gram in zip(_bounds(num_columns), alone["segment_grams"], strict=True):
        torch.testing.assert_close(gram, rows[:, start:stop] @ rows[:, start:stop].T)
    for results in run_ranks(_all_operations, 2, tmp_path, num_rows, num_columns):
        for name, value in alone.items():
            assert torch.equal(results[name], value), name


def test_many_rows_are_multiplied_some_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(update_matrix, "_SUMMED_ENTRIES", 3 * 25)
    columns = Columns.shared(NUM_COLUMNS, 1)
    rows, others = _rows(25, NUM_COLUMNS), _rows(9, NUM_COLUMNS, seed=1)
    matrix, other = (_matrix(some, columns, SingleProcess()) for some in (rows, others))
    torch.testing.assert_close(matrix.gram(), rows.double() @ rows.double().T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(matrix.inner(other), rows.double() @ others.double().T, rtol=1e-12, atol=1e-12)


def _without_rows(collectives: Collectives) -> list[tuple[int, ...]]:
    columns = Columns.shared(NUM_COLUMNS, collectives.num_ranks)
    matrix = _matrix(torch.zeros(0, NUM_COLUMNS), columns, collectives)
    summed = matrix.columnwise(lambda rows: rows.sum(0))
    return [tuple(matrix.segment_grams([(0, 10), (10, 20)]).shape), tuple(matrix.gram().shape), tuple(summed.shape)]


def test_a_matrix_without_rows(tmp_path: Path) -> None:
    assert _without_rows(SingleProcess()) == [(2, 0, 0), (0, 0), (5 * 1024,)]
    assert run_ranks(_without_rows, 2, tmp_path) == [[(2, 0, 0), (0, 0), (n * 1024,)] for n in (2, 3)]


def test_columnwise_is_given_float64_and_padding_of_zeros() -> None:
    columns = Columns.shared(20, 1)
    matrix = _matrix(_rows(3, 20), columns, SingleProcess())
    seen: list[Tensor] = []

    def function(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows.sum(0) / rows.square().sum(0)  # not finite where there is padding

    result = matrix.columnwise(function)
    assert (seen[0].dtype, seen[0].shape) == (torch.float64, (3, 32))
    assert not seen[0][:, 20:].any()
    assert torch.isfinite(assemble(result, columns, SingleProcess())).all()


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
