"""What `filter.ratio`, `filter.order` and `filter.schedule` may be: the config's table and the class agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import Segment
from fedspec_dist.filters.layerwise import ratio_at
from fedspec_dist.filters.order import Order
from tests.filters.layers import segments
from tests.reference import axis_order_matrix


def from_config(parameter: str, value: Any) -> Any:
    kind = FILTERS["rfft"].parameters[parameter][0]
    return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)


@pytest.mark.parametrize("order", ["", "012", "0122", "1234", "01234", "10", "randomly"])
def test_impossible_order_is_refused(order: str) -> None:
    with pytest.raises(ValidationError, match="must be a permutation of 0123, or random"):
        from_config("order", order)


@pytest.mark.parametrize("order", ["0123", "3120", "random"])
def test_possible_order_is_taken(order: str) -> None:
    FILTERS["rfft"].build(segments(), order=order)
    assert from_config("order", order) == order


@pytest.mark.parametrize(("number", "order"), [(1023, "1023"), (3210, "3210")])
def test_an_order_that_yaml_read_as_a_number_is_the_one_that_was_typed(number: int, order: str) -> None:
    assert from_config("order", number) == order


@pytest.mark.parametrize("order", [True, 1.5, None, [0, 1, 2, 3], 83, 123, 0, -1023])
def test_an_order_of_another_kind_is_refused(order: Any) -> None:
    with pytest.raises(ValidationError, match="valid string"):
        from_config("order", order)


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [[1]],
        [[1, 0.1, 0.2]],
        [[0, 0.1]],
        [[-3, 0.1]],
        [[1.5, 0.1]],
        [[float("inf"), 0.1]],
        [[1, 1.0]],
        [[1, -0.1]],
        [[1, float("nan")]],
        [[2, 0.1], [2, 0.2]],
        [[3, 0.1], [2, 0.2]],
    ],
)
def test_impossible_schedule_is_refused(schedule: Any) -> None:
    allowed = r"must be \[round, ratio\] pairs, with increasing rounds from 1 on and ratios of at least 0 and below 1"
    with pytest.raises(ValidationError, match=allowed):
        from_config("schedule", schedule)


@pytest.mark.parametrize("schedule", [[1, 0.1], ["ab"], [{1: 2}], [[True, 0.1]], [["1", 0.1]], [[1, "0"]]])
def test_a_schedule_of_other_kinds_is_refused_in_a_config(schedule: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be \[round, ratio\] pairs"):
        from_config("schedule", schedule)


@pytest.mark.parametrize("schedule", [None, [[1, 0]], [[7, 0.0], [8, 0.99]]])
def test_possible_schedule_is_taken(schedule: Any) -> None:
    FILTERS["rfft"].build(segments(), schedule=schedule)
    assert from_config("schedule", schedule) == schedule


@pytest.mark.parametrize(
    ("round_number", "ratio"), [(1, 0.1), (10, 0.1), (15, 0.15), (20, 0.2), (30, 0.1), (40, 0.0), (41, 0.0)]
)
def test_ratio_is_linear_between_points_and_constant_outside(round_number: int, ratio: float) -> None:
    assert ratio_at([[10, 0.1], [20, 0.2], [40, 0.0]], round_number) == pytest.approx(ratio, abs=1e-15)


@pytest.mark.parametrize(
    ("order", "shape", "axes"),
    [
        ("1023", (4, 3), [1, 0]),
        ("3120", (4, 3), [1, 0]),
        ("3120", (4, 3, 2), [1, 2, 0]),
        ("2301", (2, 3, 4, 5), [2, 3, 0, 1]),
        ("1023", (2, 3, 2, 2, 3), [1, 0, 2, 3, 4]),
        ("3210", (7,), [0]),
        ("3210", (), []),
    ],
)
def test_a_tensor_of_other_than_four_axes_keeps_the_order_of_those_it_has(
    order: str, shape: tuple[int, ...], axes: list[int]
) -> None:
    size = int(torch.tensor(shape).prod())
    index = Order(order).index(Segment("layer", shape, 0, size), place=0)
    assert torch.equal(torch.eye(size, dtype=torch.float64)[index], axis_order_matrix(shape, axes))


def test_the_papers_order_on_a_small_convolution() -> None:
    weight = torch.tensor([1.0, 2, 5, 8], dtype=torch.float64)
    layer = Segment("conv", (2, 1, 1, 2), 0, 4)
    for order, expected in [("0123", [-1.0, 1, -1, 1]), ("3120", [-2.5, -2.5, 2.5, 2.5])]:
        result = weight.clone()
        FILTERS["rfft"].build([layer], ratio=0.67, order=order)(result)
        torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_random_order_differs_between_layers_and_nowhere_else() -> None:
    layers = [Segment("a", (50,), 0, 50), Segment("b", (5, 10), 50, 50)]
    first, again = (Order("random").permutations(layers)[50].forward for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first.sort(-1).values, torch.arange(50).expand(2, 50))
