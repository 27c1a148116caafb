from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspec_dist.distributed.assignment import assign, imbalance


def test_longest_first_to_the_least_loaded() -> None:
    # 7 and 5 open the ranks, 4 joins the 5, 3 joins the 7, 1 joins the 9 (tie at 10/9 -> least).
    assert assign([3, 7, 5, 1, 4], 2) == [[1, 0], [2, 4, 3]]
    assert imbalance([3, 7, 5, 1, 4], [[1, 0], [2, 4, 3]]) == 1.0


def test_ties_go_to_the_lower_position_and_rank() -> None:
    assert assign([1, 1, 1], 2) == [[0, 2], [1]]


def test_items_without_cost_are_spread_too() -> None:
    assert assign([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]


def test_more_ranks_than_clients_leaves_ranks_empty() -> None:
    assert assign([2, 1], 4) == [[0], [1], [], []]
    assert imbalance([2, 1], assign([2, 1], 4)) == pytest.approx(2 / 0.75)
    assert imbalance([], assign([], 3)) == 1.0


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_every_item_once_within_grahams_bound(costs: list[int], num_ranks: int) -> None:
    plan = assign(costs, num_ranks)
    assert sorted(position for positions in plan for position in positions) == list(range(len(costs)))
    loads = [sum(costs[p] for p in positions) for positions in plan]
    # LPT is within 4/3 of the optimum, which is at least the mean and at least the largest item.
    lower = max(sum(costs) / num_ranks, max(costs, default=0))
    top = sorted(costs, reverse=True)
    if len(top) > num_ranks:
        lower = max(lower, top[num_ranks - 1] + top[num_ranks])
    assert max(loads) <= (4 / 3) * lower + 1e-9
