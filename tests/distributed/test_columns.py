from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspec_dist.distributed.columns import Columns, block_width

SIZES = st.integers(1, 3_000_000)


@given(SIZES, st.integers(0, 3000), st.integers(1, 17))
def test_blocks_cover_the_columns_and_do_not_depend_on_ranks(size: int, total_rank: int, num_ranks: int) -> None:
    columns = Columns.shared(size, num_ranks, total_rank)
    assert columns.width == block_width(size, total_rank)
    assert columns.width % 16 == 0
    assert columns.padded - columns.width < size <= columns.padded
    starts = [start for start, _ in columns.owners]
    stops = [stop for _, stop in columns.owners]
    assert starts == [0, *stops[:-1]]
    assert stops[-1] == columns.num_blocks == Columns.shared(size, 1, total_rank).num_blocks
    assert max(map(columns.count, range(num_ranks))) - min(map(columns.count, range(num_ranks))) <= 1


@pytest.mark.parametrize(("size", "width"), [(62_006, 1024), (272_474, 4272), (11_173_962, 65_536), (10, 16)])
def test_widths_of_known_models(size: int, width: int) -> None:
    assert block_width(size) == width


def test_blocks_are_tall_for_a_qr_unless_there_are_not_enough_rows() -> None:
    assert block_width(272_474, total_rank=5000) == 10_000
    assert block_width(100, total_rank=5000) == 112


def test_gathered_gives_rank_0_everything() -> None:
    columns = Columns.gathered(5000, 3)
    assert [columns.count(rank) for rank in range(3)] == [5, 0, 0]


@given(st.integers(1, 9000), st.integers(1, 6))
def test_slices_put_together_are_the_vector(size: int, num_ranks: int) -> None:
    vector = torch.arange(size, dtype=torch.float32)
    columns = Columns.shared(size, num_ranks)
    parts = [columns.slice(vector, rank) for rank in range(num_ranks)]
    whole = torch.cat(parts)
    assert torch.equal(whole[:size], vector)
    assert not whole[size:].any()
