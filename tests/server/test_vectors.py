"""Sums over whole vectors."""

from __future__ import annotations

import pytest
import torch

from fedspec_dist.server.distances import inner


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 100_000])
def test_inner_product_in_float64(size: int) -> None:
    left, right = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
    assert inner(left, right) == pytest.approx(float(left.double() @ right.double()), rel=1e-12, abs=1e-12)


def test_same_bits_at_any_number_of_threads() -> None:
    vector = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.add(inner(vector, vector))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
