"""The growing grid on surfaces that are known, most with their optimum outside the first grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from launch.tune import Point, Search, Verdict, step

Surface = Callable[..., float | None]


def solve(
    search: Search, surface: Surface, legal: Callable[[Point], bool] = lambda point: True
) -> tuple[Verdict, dict[Point, float | None], list[list[Point]]]:
    """The verdict, all that was tried, and the batches in which it was asked for."""
    told: dict[Point, float | None] = {}
    batches = []
    for _ in range(100):
        asked = step(search, told, legal)
        if isinstance(asked, Verdict):
            return asked, told, batches
        assert asked
        assert not set(asked) & set(told), "asked twice"
        batches.append(asked)
        told |= {point: surface(*point) for point in asked}
    raise AssertionError("the search does not end")


def peak(**optima: float) -> Surface:
    """A hill in the logarithms, with its top at the given place."""
    return lambda *point: -sum(math.log(x / best) ** 2 for x, best in zip(point, optima.values(), strict=True))


def whole(point: Point) -> bool:
    """What a config takes for a count."""
    return all(isinstance(value, int) and value >= 1 for value in point)


def test_an_optimum_within_the_first_grid_asks_for_nothing_more() -> None:
    verdict, _told, batches = solve(Search({"lr": [0.1, 0.01, 1.0]}, budget=9), peak(lr=0.1))
    assert verdict == Verdict((0.1,), 0.0, True, "values on all sides are worse", 3)
    assert batches == [[(0.01,), (0.1,), (1.0,)]]


@pytest.mark.parametrize(("optimum", "grown"), [(0.8, {0.2, 0.4, 0.8, 1.6}), (0.0125, {0.025, 0.0125, 0.00625})])
def test_an_optimum_outside_the_first_grid_is_reached_with_the_ratio_of_the_edge(
    optimum: float, grown: set[float]
) -> None:
    verdict, told, _ = solve(Search({"lr": [0.05, 0.1]}, budget=20), peak(lr=optimum))
    assert verdict.best == (optimum,)
    assert verdict.interior
    assert {lr for (lr,) in told} == {0.05, 0.1} | grown


def test_a_corner_grows_on_both_its_sides_and_only_there() -> None:
    search = Search({"lr": [0.01, 0.1], "mu": [1, 2, 4]}, budget=60)
    verdict, told, batches = solve(search, peak(lr=1.0, mu=16))
    assert verdict.best == (1.0, 16)
    assert verdict.interior
    assert {mu for _, mu in told} == {1, 2, 4, 8, 16, 32}
    assert {lr for lr, _ in told} == {0.01, 0.1, 1.0, 10.0}
    # The grid stays a grid: a new value is tried with all values of the other axes.
    assert set(told) == set(itertools.product([0.01, 0.1, 1.0, 10.0], [1, 2, 4, 8, 16, 32]))
    assert (1.0, 8) in batches[1], "both sides grow at once"


def test_a_plateau_that_reaches_the_edge_grows_there() -> None:
    def plateau(lr: float) -> float:
        return 0.9 if 0.1 <= lr <= 3 else 0.5

    verdict, told, _ = solve(Search({"lr": [0.01, 0.1, 1.0]}, budget=20), plateau)
    assert verdict.best == (0.1,), "the first of equals"
    assert (10.0,) in told
    assert verdict.interior


def test_a_plateau_inside_needs_no_growth() -> None:
    verdict, told, _ = solve(Search({"lr": [1, 2, 3, 4]}, budget=9), lambda lr: 0.9 if lr in (2, 3) else 0.1)
    assert verdict.interior
    assert len(told) == 4


def test_an_equal_point_apart_from_the_first_counts_too() -> None:
    values = {1: 0.1, 2: 0.9, 3: 0.1, 4: 0.9}
    verdict, told, _ = solve(Search({"n": [1, 2, 3, 4]}, budget=9), lambda n: values.get(n, 0.0), whole)
    assert (5,) in told
    assert verdict.best == (2,)
    assert verdict.interior


def test_tolerance_makes_a_near_tie_a_plateau() -> None:
    values = {1: 0.1, 2: 0.9, 3: 0.899}
    exact, told, _ = solve(Search({"n": [1, 2, 3]}, budget=9), lambda n: values.get(n, 0.0))
    assert len(told) == 3
    near, told, _ = solve(Search({"n": [1, 2, 3]}, budget=9, tolerance=0.01), lambda n: values.get(n, 0.0))
    assert len(told) == 4
    assert exact.best == near.best == (2,)
    assert near.interior


def test_an_endless_plateau_ends_with_the_budget() -> None:
    verdict, told, _ = solve(Search({"lr": [0.1, 1.0]}, budget=7), lambda lr: 0.5)
    assert len(told) == verdict.tried == 7
    assert not verdict.interior
    assert verdict.reason.startswith("the budget of 7 is spent; not tried: lr ")


def test_the_last_of_the_budget_goes_next_to_the_best_point() -> None:
    search = Search({"lr": [0.01, 0.1], "mu": [1, 2, 3, 4]}, budget=9)
    verdict, _told, batches = solve(search, peak(lr=1.0, mu=3))
    assert batches[1] == [(1.0, 3)]
    assert verdict.best == (1.0, 3)
    assert not verdict.interior


def test_a_budget_that_just_reaches_the_neighbours_verifies() -> None:
    verdict, told, _ = solve(Search({"lr": [0.1, 1.0]}, budget=3), peak(lr=1.0))
    assert len(told) == 3
    assert verdict.interior


def test_diverged_points_are_never_best_and_bound_the_optimum() -> None:
    verdict, told, _ = solve(Search({"lr": [0.1, 1.0]}, budget=9), lambda lr: None if lr > 1 else lr)
    assert verdict.best == (1.0,)
    assert told[(10.0,)] is None
    assert verdict.interior


def test_the_first_grid_may_diverge_at_its_edge() -> None:
    verdict, _told, _ = solve(Search({"lr": [0.1, 1.0]}, budget=9), lambda lr: None if lr > 0.5 else -abs(lr - 0.01))
    assert verdict.best == (0.01,)
    assert verdict.interior


def test_nothing_finite_is_said() -> None:
    verdict, _told, _ = solve(Search({"lr": [0.1, 1.0]}, budget=9), lambda lr: None)
    assert verdict == Verdict(None, None, False, "no point has a finite result", 2)


def test_without_expand_the_edge_is_reported() -> None:
    verdict, _told, _ = solve(Search({"lr": [0.1, 1.0], "mu": [1, 2, 3]}, expand=False), peak(lr=1.0, mu=2))
    assert verdict == Verdict((1.0, 2), 0.0, False, "not tried: lr above 1.0", 6)


def test_a_bound_is_approached_but_not_crossed() -> None:
    verdict, told, _ = solve(Search({"ratio": [0.5, 0.9]}, budget=30), lambda r: r, legal=lambda point: point[0] < 1)
    tried = sorted(ratio for (ratio,) in told)
    assert tried[:2] == [0.5, 0.9]
    assert 0.9 < tried[2] < 1
    assert all(ratio < 1 for ratio in tried)
    assert len(tried) < 6, "no endless approach"
    assert not verdict.interior
    assert verdict.reason == f"at the bound of what the config allows: ratio above {tried[-1]}"


def test_an_axis_with_zero_grows_upward_by_ratios_and_stops_at_its_bound_below() -> None:
    search = Search({"mu": [0, 0.01, 0.1]}, budget=9)
    up, told, _ = solve(search, lambda mu: -abs(mu - 1.0), legal=lambda point: point[0] >= 0)
    assert up.best == (1.0,)
    assert (10.0,) in told
    down, told, _ = solve(search, lambda mu: -mu, legal=lambda point: point[0] >= 0)
    assert down.best == (0,)
    assert len(told) == 3
    assert down.reason == "at the bound of what the config allows: mu below 0"


def test_an_axis_with_negative_values_grows_by_differences() -> None:
    _, told, _ = solve(Search({"b": [-1, 0, 1]}, budget=9), lambda b: -abs(b - 3))
    assert [b for (b,) in told] == [-1, 0, 1, 2, 3, 4]
    assert all(isinstance(b, int) for (b,) in told)


def test_whole_numbers_stay_whole_and_always_move_where_the_config_takes_no_others() -> None:
    verdict, told, _ = solve(Search({"epochs": [4, 5]}, budget=20), lambda n: -abs(n - 1), whole)
    assert all(isinstance(n, int) for (n,) in told)
    assert verdict.best == (1,)
    assert verdict.reason == "at the bound of what the config allows: epochs below 1"


@pytest.mark.parametrize("values", [[1, 10], [1, 10, 100]])
def test_a_grid_written_in_whole_numbers_goes_below_one_by_ratios(values: list[int]) -> None:
    verdict, told, _ = solve(Search({"lr": values}, budget=9), peak(lr=0.1), lambda point: point[0] > 0)
    assert verdict.best == (0.1,)
    assert verdict.interior
    assert sorted(lr for (lr,) in told)[:3] == [0.01, 0.1, 1]


def test_a_single_number_has_no_neighbours() -> None:
    verdict, _, _ = solve(Search({"lr": [0.1]}, expand=False), peak(lr=0.1))
    assert verdict == Verdict((0.1,), 0.0, False, "not tried: lr below 0.1, lr above 0.1", 1)


def test_of_names_alone_all_are_tried() -> None:
    verdict, _, _ = solve(Search({"mode": ["a", "b"]}, budget=5), lambda mode: mode == "b")
    assert verdict == Verdict(("b",), True, True, "all values were tried", 2)


def test_names_have_no_edge() -> None:
    search = Search({"mode": ["pairwise", "snapshot"], "adaptive": [False, True], "lr": [1, 2, 3]}, budget=12)
    verdict, told, _ = solve(search, lambda mode, adaptive, lr: (mode == "snapshot") + adaptive - abs(lr - 2))
    assert verdict.best == ("snapshot", True, 2)
    assert verdict.interior
    assert len(told) == 12


def test_points_that_the_config_refuses_are_left_out() -> None:
    search = Search({"a": [1, 2, 3], "b": [1, 2, 3]}, budget=30)
    verdict, told, _ = solve(search, lambda a, b: -abs(a - 2) - abs(b - 2), lambda point: point != (3, 3))
    assert (3, 3) not in told
    assert len(told) == 8
    assert verdict.interior


def test_grown_values_are_round_numbers() -> None:
    _, told, _ = solve(Search({"lr": [0.01, 0.03]}, budget=6), lambda lr: lr)
    assert [lr for (lr,) in told] == [0.01, 0.03, 0.09, 0.27, 0.81, 2.43]


@pytest.mark.parametrize("seed", range(5))
def test_a_search_goes_on_from_any_part_of_its_results(seed: int) -> None:
    """Results alone decide: in any order, one at a time, and also when some of a later batch are there already."""
    search = Search({"lr": [0.01, 0.1], "mu": [1, 2]}, budget=25)
    surface = peak(lr=5.0, mu=7)
    verdict, told, _ = solve(search, surface)
    keys = sorted(told, key=lambda point: hash((seed, point)))
    part = {point: told[point] for point in keys[: len(keys) // 2]}
    for _ in range(100):
        asked = step(search, part)
        if isinstance(asked, Verdict):
            break
        part[asked[-1]] = surface(*asked[-1])
    assert asked == verdict
    assert part == told
