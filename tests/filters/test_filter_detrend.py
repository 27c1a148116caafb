"""LAP-D and GD: the worked numbers, the widths, the ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import Segment
from fedspec_dist.filters.detrend import detrended, gaussian_weights, window
from tests.reference import gaussian_matrix, lapd_matrix, moving_average_width


def test_worked_moving_average() -> None:
    gradient = torch.tensor([1.0, 2, 6, 3], dtype=torch.float64)
    result = detrended(gradient, (1.0, 1.0))
    expected = torch.tensor([-0.5, -1, 7 / 3, -1.5], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    smooth = torch.tensor([1.5, 3, 11 / 3, 4.5], dtype=torch.float64)
    torch.testing.assert_close(gradient - result, smooth, rtol=0, atol=1e-14)


def test_worked_gaussian_taps() -> None:
    middle, side = gaussian_weights(sigma=1.0, radius=1)
    total = middle + 2 * side
    assert (side / total, middle / total) == pytest.approx((0.2740686, 0.4518628), abs=5e-8)
    assert len(gaussian_weights(5.3, 16)) == 17


@pytest.mark.parametrize(
    ("ratio", "width"), [(0.01, 89), (0.05, 17), (0.1, 9), (0.2, 5), (0.3, 3), (0.44, 3), (0.45, 1), (0.9, 1)]
)
def test_window_is_the_nearest_odd_width(ratio: float, width: int) -> None:
    assert window(ratio) == width == moving_average_width(ratio)


def test_the_gaussian_at_the_default_ratio_has_sixteen_taps_on_each_side() -> None:
    weights = FILTERS["gaussian"].build([], ratio=0.05).weights()
    assert len(weights) == 17
    assert weights == pytest.approx(gaussian_weights(5.3, 16), rel=1e-12)


@pytest.mark.parametrize("kind", ["lapd", "gaussian"])
@pytest.mark.parametrize(("d", "is_filtered"), [(16, False), (17, True), (18, True)])
def test_layers_shorter_than_the_window_pass(kind: str, d: int, is_filtered: bool) -> None:
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(0))
    result = gradient.clone()
    FILTERS[kind].build([Segment("layer", (d,), 0, d)], ratio=0.05)(result)
    assert torch.equal(result, gradient) != is_filtered


@pytest.mark.parametrize("kind", ["lapd", "gaussian"])
@pytest.mark.parametrize("value", [0.1, -3e-30, 1e30])
def test_a_constant_becomes_exactly_zero(kind: str, value: float) -> None:
    gradient = torch.full((2, 50), value)
    FILTERS[kind].build([Segment("layer", (50,), 0, 50)])(gradient)
    assert not gradient.any()


@pytest.mark.parametrize("d", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("ratio", [0.03, 0.2, 0.45, 0.9])
@pytest.mark.parametrize(("kind", "matrix"), [("lapd", lapd_matrix), ("gaussian", gaussian_matrix)])
def test_every_length_equals_its_matrix(
    kind: str, matrix: Callable[[int, float], Tensor], d: int, ratio: float
) -> None:
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    result = gradient.clone()
    FILTERS[kind].build([Segment("layer", (d,), 0, d)], ratio)(result)
    torch.testing.assert_close(result, matrix(d, ratio) @ gradient, rtol=0, atol=1e-13)


def test_half_precision_is_computed_in_float32() -> None:
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(detrended(gradient, (1.0, 1.0, 1.0)), detrended(gradient.float(), (1.0, 1.0, 1.0)).half())
