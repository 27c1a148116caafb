"""Every filter against its dense matrix, and the worked numbers of the high-pass filter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspec_dist.filters.spectral import HighPass, high_pass, num_removed
from fedspec_dist.methods import FILTERS
from fedspec_dist.parameters import ParameterLayout, Segment
from tests.reference import high_pass_matrix

SIZES = (40, 3, 61, 40, 1, 90, 61, 40)
SKIPPED = {1, 5}  # layers that no filter is given


@dataclass(frozen=True)
class Case:
    name: str
    parameters: dict[str, float]
    layer_matrix: Callable[[int], Tensor]
    is_projection: bool = True


CASES = [
    Case("none", {}, lambda d: torch.eye(d, dtype=torch.float64)),
    Case("rfft", {}, lambda d: high_pass_matrix(d, 0.05)),
    Case("rfft", {"ratio": 0.34}, lambda d: high_pass_matrix(d, 0.34)),
    Case("rfft", {"ratio": 0.99}, lambda d: high_pass_matrix(d, 0.99)),
]


def segments() -> list[Segment]:
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    return [
        Segment(f"layer{i}", (size,), start, size) for i, (size, start) in enumerate(zip(SIZES, starts, strict=True))
    ]


def filtered(case: Case, gradient: Tensor) -> Tensor:
    result = gradient.clone()
    kept = [segment for i, segment in enumerate(segments()) if i not in SKIPPED]
    assert FILTERS[case.name].build(kept, **case.parameters)(result) is None
    return result


def dense(case: Case) -> Tensor:
    blocks = [
        torch.eye(size, dtype=torch.float64) if i in SKIPPED else case.layer_matrix(size)
        for i, size in enumerate(SIZES)
    ]
    return torch.block_diag(*blocks)


def random_gradient(*leading: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*leading, sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


every_filter = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}{case.parameters}")


def test_table_covers_every_filter() -> None:
    assert {case.name for case in CASES} == set(FILTERS)


@every_filter
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)],
)
def test_equals_its_dense_matrix_in_every_dtype(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    gradient = random_gradient(dtype=dtype)
    result = filtered(case, gradient)
    assert (result.shape, result.dtype, result.device) == (gradient.shape, dtype, gradient.device)
    torch.testing.assert_close(result.double(), dense(case) @ gradient.double(), rtol=0, atol=tolerance)


@every_filter
def test_rows_of_clients_are_filtered_independently(case: Case) -> None:
    gradient = random_gradient(3)
    together = filtered(case, gradient)
    for row, alone in zip(together, gradient, strict=True):
        torch.testing.assert_close(row, filtered(case, alone), rtol=0, atol=1e-14)


@every_filter
def test_is_linear(case: Case) -> None:
    left, right = random_gradient(2)
    torch.testing.assert_close(
        filtered(case, 2 * left - 3 * right),
        2 * filtered(case, left) - 3 * filtered(case, right),
        rtol=0,
        atol=1e-12,
    )


@every_filter
def test_is_an_orthogonal_projection(case: Case) -> None:
    if not case.is_projection:
        pytest.skip("not a projection")
    left, right = random_gradient(2)
    once = filtered(case, left)
    torch.testing.assert_close(filtered(case, once), once, rtol=0, atol=1e-13)
    assert float(once @ right) == pytest.approx(float(left @ filtered(case, right)), abs=1e-12)
    assert float(once @ (left - once)) == pytest.approx(0, abs=1e-12)


@every_filter
def test_calls_share_nothing_but_buffers(case: Case) -> None:
    kept = [segment for i, segment in enumerate(segments()) if i not in SKIPPED]
    gradient_filter = FILTERS[case.name].build(kept, **case.parameters)
    for gradient in (
        random_gradient(),
        random_gradient(2),
        random_gradient(dtype=torch.float32),
        random_gradient(),
    ):
        result = gradient.clone()
        gradient_filter(result)
        gradient_filter(torch.full_like(gradient, 7.0))
        assert torch.equal(result, filtered(case, gradient))


def test_filters_a_slice_of_a_larger_buffer() -> None:
    wide = torch.zeros(2, sum(SIZES) + 5, dtype=torch.float64)
    wide[:, : sum(SIZES)] = random_gradient(2)
    HighPass(segments(), ratio=0.3)(wide[:, : sum(SIZES)])
    expected = random_gradient(2)
    HighPass(segments(), ratio=0.3)(expected)
    assert torch.equal(wide[:, : sum(SIZES)], expected)
    assert not wide[:, sum(SIZES) :].any()


@pytest.mark.parametrize("ratio", [0.0, 0.04])
def test_layers_without_removed_coefficients_are_untouched_bit_for_bit(ratio: float) -> None:
    gradient = random_gradient(dtype=torch.float32)
    result = gradient.clone()
    HighPass(segments(), ratio=ratio)(result)
    for segment in segments():
        same = torch.equal(
            result[segment.start : segment.stop].view(torch.int32),
            gradient[segment.start : segment.stop].view(torch.int32),
        )
        assert same == (num_removed(segment.size, ratio) == 0)


def test_ratio_zero_returns_the_input_itself() -> None:
    gradient = random_gradient()
    assert high_pass(gradient, 0.0) is gradient


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
    HighPass([Segment(str(i), (d,), i * d, d) for i in range(3)], ratio)(flat)
    torch.testing.assert_close(flat, expected.flatten(-2), rtol=0, atol=1e-12)
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
    HighPass(layout.select(["1.*"]), ratio=0.1)(result)
    changed = {name for name, view in layout.views(result - gradient).items() if view.any()}
    assert changed == {"1.weight"}
    assert result[90:171].mean().abs() < 1e-6


def test_sgd_from_one_start_moves_in_the_range_of_the_filter() -> None:
    layers = segments()
    high = HighPass(layers, ratio=0.2)
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


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_impossible_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"filter\.ratio: must be at least 0 and below 1, got"):
        HighPass(segments(), ratio=ratio)
