"""The Fisher merge's worked numbers and its fall-back."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.server.aggregators.means import FisherDiagonal
from tests.reference import dense_cohort

THETA = torch.tensor([5.0, -1.0], dtype=torch.float64)
MODELS = torch.tensor([[1.0, 2], [2, 0]], dtype=torch.float64)


def merged(fisher: list[list[float]], weights: list[float] | None = None) -> Tensor:
    uploads = {"fisher_diagonal": torch.tensor(fisher, dtype=torch.float64)}
    cohort = dense_cohort(MODELS - THETA, THETA, weights=weights or [0.5, 0.5], uploads=uploads)
    return THETA + FisherDiagonal().direction(cohort).slice


def test_worked_numbers() -> None:
    torch.testing.assert_close(merged([[1, 4], [3, 0]]), torch.tensor([1.75, 2], dtype=torch.float64))


def test_weights_multiply_the_diagonals() -> None:
    expected = torch.tensor([(0.25 + 0.75 * 3 * 2) / (0.25 + 0.75 * 3), 2], dtype=torch.float64)
    torch.testing.assert_close(merged([[1, 4], [3, 0]], [0.25, 0.75]), expected)


def test_where_nobody_is_sure_the_weighted_mean() -> None:
    # The threshold is on the weighted mean of the diagonals, 1e-6.
    result = merged([[0, 1.8e-6], [0, 0]], [0.25, 0.75])
    torch.testing.assert_close(result, torch.tensor([1.75, 0.5], dtype=torch.float64))
    result = merged([[0, 4.2e-6], [0, 0]], [0.25, 0.75])
    torch.testing.assert_close(result, torch.tensor([1.75, 2.0], dtype=torch.float64))


def test_diagnostics() -> None:
    uploads = {"fisher_diagonal": torch.tensor([[3.0, 4], [0, 1]], dtype=torch.float64)}
    result = FisherDiagonal().direction(dense_cohort(MODELS, uploads=uploads))
    assert result.diagnostics == {"fisher_diagonal/norm": 3.0}
