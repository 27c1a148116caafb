"""The table of all filters: each against a dense twin, and what every filter promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import Segment
from tests.filters.layers import NUM_PARAMETERS, SKIPPED, given, random_gradient, same_bits, segments
from tests.reference import (
    axis_order_matrix,
    centralization_matrix,
    gaussian_matrix,
    high_pass_matrix,
    lapd_matrix,
    low_pass_matrix,
    random_order_matrix,
    randomly_suppressed_matrices,
)

SEED = 2**63 - 1
Matrix = Callable[[Segment, int], Tensor]  # of a layer and its place among those given


@dataclass(frozen=True)
class Case:
    name: str
    matrix: Matrix
    parameters: dict[str, Any] = field(default_factory=dict)
    is_projection: bool = True
    only_rescales: bool = False  # to the norm that the matrix would leave

    @property
    def is_linear(self) -> bool:
        return not self.only_rescales

    @property
    def label(self) -> str:
        return "-".join([self.name, *(f"{key}{value}" for key, value in self.parameters.items())])


def by_size(matrix: Callable[[int, float], Tensor], ratio: float = 0.05) -> Matrix:
    return lambda segment, place: matrix(segment.size, ratio)


def read_as(axes: Callable[[int], list[int]], matrix: Callable[[int, float], Tensor], ratio: float) -> Matrix:
    def reordered(segment: Segment, place: int) -> Tensor:
        order = axis_order_matrix(segment.shape, axes(len(segment.shape)))
        return order.T @ matrix(segment.size, ratio) @ order

    return reordered


def read_at_random(matrix: Callable[[int, float], Tensor], ratio: float) -> Matrix:
    def reordered(segment: Segment, place: int) -> Tensor:
        order = random_order_matrix(segment.size, place)
        return order.T @ matrix(segment.size, ratio) @ order

    return reordered


def drawn(ratio: float) -> Matrix:
    matrices = randomly_suppressed_matrices([segment.size for segment in given()], ratio, SEED)
    return lambda segment, place: matrices[place]


OUT_IN_SWAPPED = [[0], [0], [1, 0], [1, 0, 2], [1, 0, 2, 3]].__getitem__  # 1023, for tensors of 0 to 4 axes
REVERSED = [[0], [0], [1, 0], [1, 2, 0], [3, 1, 2, 0]].__getitem__  # 3120

CASES = [
    Case("none", lambda segment, place: torch.eye(segment.size, dtype=torch.float64)),
    Case("rfft", by_size(high_pass_matrix)),
    Case("rfft", by_size(high_pass_matrix, 0.34), {"ratio": 0.34}),
    Case("rfft", by_size(high_pass_matrix, 0.99), {"ratio": 0.99}),
    Case("rfft", read_as(OUT_IN_SWAPPED, high_pass_matrix, 0.3), {"ratio": 0.3, "order": "1023"}),
    Case("rfft", read_as(REVERSED, high_pass_matrix, 0.3), {"ratio": 0.3, "order": "3120"}),
    Case("rfft", read_at_random(high_pass_matrix, 0.3), {"ratio": 0.3, "order": "random"}),
    Case("rfft_high", by_size(low_pass_matrix)),
    Case("rfft_high", read_at_random(low_pass_matrix, 0.34), {"ratio": 0.34, "order": "random"}),
    Case("random", drawn(0.05)),
    Case("random", drawn(0.4), {"ratio": 0.4}),
    Case("l2_rescale", by_size(high_pass_matrix), is_projection=False, only_rescales=True),
    Case(
        "l2_rescale",
        read_as(REVERSED, high_pass_matrix, 0.3),
        {"ratio": 0.3, "order": "3120"},
        is_projection=False,
        only_rescales=True,
    ),
    Case("lapd", by_size(lapd_matrix), is_projection=False),
    Case(
        "lapd",
        read_as(OUT_IN_SWAPPED, lapd_matrix, 0.1),
        {"ratio": 0.1, "order": "1023"},
        is_projection=False,
    ),
    Case("gaussian", by_size(gaussian_matrix), is_projection=False),
    Case("gaussian", by_size(gaussian_matrix, 0.5), {"ratio": 0.5}, is_projection=False),
    Case("gradient_centralization", lambda segment, place: centralization_matrix(segment.shape)),
]
every_filter = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
TAKE_A_RATIO = [name for name, row in FILTERS.items() if "ratio" in row.parameters]


def build(case: Case) -> Any:
    result = FILTERS[case.name].build(given(), **case.parameters)
    result.prepare(1, SEED)
    return result


def filtered(case: Case, gradient: Tensor) -> Tensor:
    result = gradient.clone()
    assert build(case)(result) is None
    return result


def expected(case: Case, gradient: Tensor) -> Tensor:
    result = gradient.double()
    for place, segment in enumerate(given()):
        layer = result[segment.start : segment.stop].clone()
        kept = case.matrix(segment, place) @ layer
        scaled = layer * kept.norm() / layer.norm()
        result[segment.start : segment.stop] = scaled if case.only_rescales else kept
    return result


def test_table_covers_every_filter() -> None:
    assert {case.name for case in CASES} == set(FILTERS)


@every_filter
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)],
)
def test_equals_its_dense_twin_in_every_dtype(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    gradient = random_gradient(dtype=dtype)
    result = filtered(case, gradient)
    assert (result.shape, result.dtype, result.device) == (gradient.shape, dtype, gradient.device)
    torch.testing.assert_close(result.double(), expected(case, gradient), rtol=0, atol=tolerance)


@every_filter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(case: Case, dtype: torch.dtype) -> None:
    gradient = random_gradient(dtype=dtype)
    assert torch.equal(filtered(case, gradient), filtered(case, gradient.float()).to(dtype))


@every_filter
def test_rows_of_clients_are_filtered_independently(case: Case) -> None:
    gradient = random_gradient(3)
    together = filtered(case, gradient)
    for row, alone in zip(together, gradient, strict=True):
        torch.testing.assert_close(row, filtered(case, alone), rtol=0, atol=1e-14)


@every_filter
def test_a_slice_of_a_larger_buffer_is_filtered_alone(case: Case) -> None:
    wide = torch.zeros(2, NUM_PARAMETERS + 5, dtype=torch.float64)
    wide[:, :NUM_PARAMETERS] = random_gradient(2)
    build(case)(wide[:, :NUM_PARAMETERS])
    assert torch.equal(wide[:, :NUM_PARAMETERS], filtered(case, random_gradient(2)))
    assert not wide[:, NUM_PARAMETERS:].any()


@every_filter
def test_is_linear_unless_it_rescales(case: Case) -> None:
    left, right = random_gradient(2)
    together = filtered(case, 2 * left - 3 * right)
    apart = 2 * filtered(case, left) - 3 * filtered(case, right)
    assert torch.allclose(together, apart, rtol=0, atol=1e-12) == case.is_linear
    torch.testing.assert_close(filtered(case, 7 * left), 7 * filtered(case, left), rtol=0, atol=1e-12)


@every_filter
def test_is_an_orthogonal_projection_or_is_none(case: Case) -> None:
    left, right = random_gradient(2)
    once = filtered(case, left)
    assert torch.allclose(filtered(case, once), once, rtol=0, atol=1e-12) == case.is_projection
    if case.is_projection:
        assert float(once @ right) == pytest.approx(float(left @ filtered(case, right)), abs=1e-12)
        assert float(once @ (left - once)) == pytest.approx(0, abs=1e-12)


@every_filter
def test_a_gradient_of_zero_stays_zero(case: Case) -> None:
    assert not filtered(case, torch.zeros(NUM_PARAMETERS)).any()


@every_filter
def test_calls_share_nothing_but_buffers(case: Case) -> None:
    gradient_filter = build(case)
    for gradient in (random_gradient(), random_gradient(2), random_gradient(dtype=torch.float32), random_gradient()):
        gradient_filter.prepare(1, SEED)
        result = gradient.clone()
        gradient_filter(result)
        gradient_filter(torch.full_like(gradient, 7.0))
        assert torch.equal(result, filtered(case, gradient))


@every_filter
def test_what_is_not_filtered_keeps_its_bits(case: Case) -> None:
    gradient = random_gradient(2, dtype=torch.float32)
    gradient[:, ::7] = -0.0
    result = filtered(case, gradient)
    for i, segment in enumerate(segments()):
        place = i - sum(skipped < i for skipped in SKIPPED)
        untouched = i in SKIPPED or torch.equal(
            case.matrix(segment, place), torch.eye(segment.size, dtype=torch.float64)
        )
        before, after = (vector[:, segment.start : segment.stop] for vector in (gradient, result))
        assert same_bits(before, after) == untouched, segment


@pytest.mark.parametrize("name", TAKE_A_RATIO)
@pytest.mark.parametrize("order", ["0123", "3210", "random"])
def test_ratio_zero_keeps_every_bit(name: str, order: str) -> None:
    gradient = random_gradient(dtype=torch.float32)
    result = filtered(Case(name, by_size(high_pass_matrix), {"ratio": 0.0, "order": order}), gradient)
    assert same_bits(result, gradient)


@pytest.mark.parametrize("name", TAKE_A_RATIO)
def test_a_schedule_takes_the_place_of_the_ratio(name: str) -> None:
    scheduled = FILTERS[name].build(given(), ratio=0.9, schedule=[[5, 0.0], [15, 0.5]])
    for round_number, ratio in [(100, 0.5), (15, 0.5), (9, 0.2), (5, 0.0), (1, 0.0), (10, 0.25)]:
        scheduled.prepare(round_number, SEED)
        result = random_gradient()
        scheduled(result)
        constant = Case(name, by_size(high_pass_matrix), {"ratio": ratio})
        assert same_bits(result, filtered(constant, random_gradient()))
    scheduled = FILTERS[name].build(given(), ratio=0.9, schedule=[[1, 0.0], [15, 0.5]])
    result = random_gradient()
    scheduled(result)
    assert same_bits(result, random_gradient())
