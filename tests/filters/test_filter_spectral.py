"""The worked numbers of the high-pass filter and its mirror image, and the fast form of long layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import ParameterLayout, Segment
from fedspec_dist.filters.spectral import high_pass, high_pass_in_parts, low_pass, num_removed
from tests.filters.layers import random_gradient, segments
from tests.reference import high_pass_matrix, low_pass_matrix


@pytest.mark.parametrize("ratio", [0.0, 0.04])
def test_layers_without_removed_coefficients_are_untouched_bit_for_bit(ratio: float) -> None:
    gradient = random_gradient(dtype=torch.float32)
    result = gradient.clone()
    FILTERS["rfft"].build(segments(), ratio=ratio)(result)
    for segment in segments():
        same = torch.equal(
            result[segment.start : segment.stop].view(torch.int32),
            gradient[segment.start : segment.stop].view(torch.int32),
        )
        assert same == (num_removed(segment.size, ratio) == 0)


def test_ratio_zero_returns_the_input_itself() -> None:
    gradient = random_gradient()
    assert high_pass(gradient, 0.0) is gradient
    assert low_pass(gradient, 0.0) is gradient


@pytest.mark.parametrize(
    ("gradient", "ratio", "expected"),
    [
        ([4, 2, 0, 2], 0.34, [2, 0, -2, 0]),
        ([4, 2, 0, 2], 0.67, [0, 0, 0, 0]),
        ([1, 2, 3, 4, 5], 0.34, [-2, -1, 0, 1, 2]),
        ([1, 2, 3, 4, 5], 0.67, [-1, 0.6180339887, 0, -0.6180339887, 1]),
        ([1, 2, 5, 8], 0.67, [-1, 1, -1, 1]),
        ([3, 3, 3, 3, 3, 3], 0.3, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_worked_numbers(gradient: list[float], ratio: float, expected: list[float]) -> None:
    result = high_pass(torch.tensor(gradient, dtype=torch.float64), ratio)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("gradient", "ratio", "expected"),
    [
        ([1, 2, 3, 4, 5], 0.34, [2, 1.3819660113, 3, 4.6180339887, 4]),
        ([4, 2, 0, 2], 0.34, [4, 2, 0, 2]),
        ([1, -1, 1, -1], 0.34, [0, 0, 0, 0]),
        ([3, 3, 3, 3], 0.67, [3, 3, 3, 3]),
    ],
)
def test_worked_numbers_of_high_frequency_suppression(
    gradient: list[float], ratio: float, expected: list[float]
) -> None:
    result = low_pass(torch.tensor(gradient, dtype=torch.float64), ratio)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("d", "ratio", "cut"),
    [
        (37, 0.05, 0),
        (38, 0.05, 1),
        (77, 0.05, 1),
        (78, 0.05, 2),
        (432, 0.05, 10),
        (2304, 0.05, 57),
        (17, 0.1, 0),
        (18, 0.1, 1),
        (197, 0.01, 0),
        (198, 0.01, 1),
        (198, 0.29, 29),
        (1, 0.99, 0),
        (5, 0.0, 0),
    ],
)
def test_num_removed(d: int, ratio: float, cut: int) -> None:
    assert num_removed(d, ratio) == cut


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 64, 65])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.9])
def test_every_length_equals_its_matrix(d: int, ratio: float) -> None:
    gradient = torch.randn(2, 3, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    expected = gradient @ high_pass_matrix(d, ratio).T
    torch.testing.assert_close(high_pass(gradient, ratio), expected, rtol=0, atol=1e-13)
    expected = gradient @ low_pass_matrix(d, ratio).T
    torch.testing.assert_close(low_pass(gradient, ratio), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("d", [2048, 2049, 2050, 2052, 2400, 10080, 48000])
@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.12, 0.26, 0.9])
def test_a_long_layer_equals_one_fft_of_it(d: int, ratio: float) -> None:
    # From 2048 on a layer is transformed in interleaved parts, whose number depends on the length and the ratio.
    gradient = torch.randn(2, 3, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    spectrum = np.fft.rfft(gradient.numpy())
    spectrum[..., : num_removed(d, ratio)] = 0
    expected = torch.from_numpy(np.fft.irfft(spectrum, n=d))
    torch.testing.assert_close(high_pass(gradient, ratio), expected, rtol=0, atol=1e-12)
    flat = gradient.flatten(-2).clone()
    FILTERS["rfft"].build([Segment(str(i), (d,), i * d, d) for i in range(3)], ratio)(flat)
    torch.testing.assert_close(flat, expected.flatten(-2), rtol=0, atol=1e-12)
    in_parts = high_pass_in_parts(gradient, num_removed(d, ratio))
    torch.testing.assert_close(in_parts, expected, rtol=0, atol=1e-12)
    single = high_pass(gradient.float(), ratio)
    torch.testing.assert_close(single, expected.float(), rtol=0, atol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    gradient = random_gradient(dtype=torch.bfloat16)
    expected = high_pass(gradient.float(), 0.1).bfloat16()
    assert torch.equal(high_pass(gradient, 0.1), expected)


def test_acts_on_the_layers_the_patterns_select() -> None:
    module = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    layout = ParameterLayout(module)
    gradient = torch.randn(len(layout), generator=torch.Generator().manual_seed(0))
    result = gradient.clone()
    FILTERS["rfft"].build(layout.select(["1.*"]), ratio=0.1)(result)
    changed = {name for name, view in layout.views(result - gradient).items() if view.any()}
    assert changed == {"1.weight"}
    assert result[90:171].mean().abs() < 1e-6


def test_sgd_from_one_start_moves_in_the_range_of_the_filter() -> None:
    layers = segments()
    high = FILTERS["rfft"].build(layers, ratio=0.2)
    target, theta = random_gradient(2)
    start = theta.clone()
    for _ in range(5):
        gradient = (theta - target) * torch.linspace(0.5, 2, len(theta), dtype=torch.float64)
        high(gradient)
        theta = theta - 0.1 * gradient
    moved = theta - start
    again = moved.clone()
    high(again)
    torch.testing.assert_close(again, moved, rtol=0, atol=1e-13)
    assert moved.norm() > 1
