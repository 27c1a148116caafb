"""The coordinate-wise median and trimmed mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.server.aggregators.robust import Median, TrimmedMean, num_cut
from tests.reference import dense_cohort, median_columns, trimmed_columns

ROWS = torch.tensor([[1.0, 5], [2, 5], [9, 5], [4, -7], [3, 0]], dtype=torch.float64)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_median_by_hand() -> None:
    assert torch.equal(Median().direction(dense_cohort(ROWS)).slice, tensor(3, 5))
    assert torch.equal(Median().direction(dense_cohort(ROWS[:4])).slice, tensor(3, 5))
    assert torch.equal(Median().direction(dense_cohort(ROWS[:2])).slice, tensor(1.5, 5))


def test_trimmed_mean_by_hand() -> None:
    result = TrimmedMean(trim=0.2).direction(dense_cohort(ROWS))
    torch.testing.assert_close(result.slice, tensor(3, 10 / 3))
    assert result.diagnostics == {"trimmed_mean/cut": 1.0}
    torch.testing.assert_close(TrimmedMean(trim=0.19).direction(dense_cohort(ROWS)).slice, ROWS.mean(0))
    torch.testing.assert_close(TrimmedMean(trim=0.49).direction(dense_cohort(ROWS)).slice, tensor(3, 5))


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(0.2)], ids=["median", "trimmed_mean"])
def test_weights_do_not_matter_and_one_liar_does_little(aggregator: Median | TrimmedMean) -> None:
    fair = aggregator.direction(dense_cohort(ROWS)).slice
    skewed = dense_cohort(ROWS, weights=[0.96, 0.01, 0.01, 0.01, 0.01])
    assert torch.equal(aggregator.direction(skewed).slice, fair)
    lie = ROWS.clone()
    lie[2] = 1e9
    assert (aggregator.direction(dense_cohort(lie)).slice - fair).abs().max() < 6


@pytest.mark.parametrize("num_clients", [1, 2, 3, 8, 21])
def test_equal_their_twins(num_clients: int) -> None:
    updates = torch.randn(num_clients, 40, generator=torch.Generator().manual_seed(num_clients), dtype=torch.float64)
    cohort = dense_cohort(updates)
    torch.testing.assert_close(Median().direction(cohort).slice, median_columns(updates))
    expected = trimmed_columns(updates, num_clients * 3 // 10)
    torch.testing.assert_close(TrimmedMean(0.3).direction(cohort).slice, expected)


def test_the_number_cut_is_that_of_the_decimal_fraction() -> None:
    assert [num_cut(0.29, 100), num_cut(0.1, 30), num_cut(0.1, 9), num_cut(0.0, 5)] == [29, 3, 0, 0]
    assert all(2 * num_cut(0.4999999, k) < k for k in range(1, 200))
