"""Krum, Multi-Krum, the geometric median and centered clipping, by hand and against liars."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS
from fedspec_dist.server.aggregators.robust import CenteredClipping, GeometricMedian, Krum, MultiKrum, num_byzantine
from tests.reference import centered_clipping, dense_cohort, geometric_median, krum_order, multi_krum_mean


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cohort(updates: Tensor, centre: Tensor | None = None, **given: Any) -> Any:
    memory = {"centre": torch.zeros(updates.shape[1]).double() if centre is None else centre.clone()}
    return dense_cohort(updates, memory=memory, **given)


# Points on a line: 0, 1, 2, 4 and a far one.
LINE = tensor([0, 0], [1, 0], [2, 0], [4, 0], [100, 0])


def test_krum_by_hand() -> None:
    """f = 1 of 5 leaves two neighbours: scores 1 + 4, 1 + 1, 1 + 4, 4 + 9 and 96^2 + 98^2."""
    result = Krum(byzantine=0.2).direction(cohort(LINE, ids=[3, 5, 8, 9, 11]))
    assert torch.equal(result.slice, tensor(1, 0))
    assert result.diagnostics == {"krum/client": 5.0}


def test_multi_krum_by_hand() -> None:
    assert torch.equal(AGGREGATORS["multi_krum"].build(byzantine=0.2).direction(cohort(LINE)).slice, tensor(7 / 4, 0))
    found = MultiKrum(byzantine=0.2, keep=3).direction(cohort(LINE))
    torch.testing.assert_close(found.slice, tensor(1, 0))
    assert found.diagnostics == {"multi_krum/kept": 3.0}
    torch.testing.assert_close(AGGREGATORS["multi_krum"].build(keep=99).direction(cohort(LINE)).slice, LINE.mean(0))


def test_equal_scores_go_to_the_client_of_the_lowest_id() -> None:
    assert torch.equal(AGGREGATORS["krum"].build().direction(cohort(LINE[:2])).slice, LINE[0])
    assert torch.equal(AGGREGATORS["krum"].build().direction(cohort(LINE[[3, 0]])).slice, LINE[3])
    assert torch.equal(AGGREGATORS["krum"].build().direction(cohort(LINE[[4, 1, 0]])).slice, LINE[1])


@pytest.mark.parametrize("num_clients", [1, 2, 3, 5, 9, 20])
@pytest.mark.parametrize("byzantine", [0.0, 0.2, 0.45])
def test_krum_equals_its_twin(num_clients: int, byzantine: float) -> None:
    updates, f = normal(num_clients, 12, seed=num_clients), int(byzantine * num_clients + 1e-9)
    chosen = Krum(byzantine).direction(cohort(updates)).slice
    best = krum_order(updates, f)[0]
    if max(num_clients - f - 2, 1) > 1:
        assert torch.equal(chosen, updates[best])
    else:  # with one neighbour the nearest two always share the lowest score
        assert any(torch.equal(chosen, updates[place]) for place in krum_order(updates, f)[:2])
    found = AGGREGATORS["multi_krum"].build(byzantine).direction(cohort(updates)).slice
    torch.testing.assert_close(found, multi_krum_mean(updates, f))


def test_the_number_of_byzantine_clients_is_that_of_the_decimal_fraction() -> None:
    assert [num_byzantine(0.29, 100), num_byzantine(0.2, 9), num_byzantine(0.0, 5)] == [29, 1, 0]


def test_geometric_median_by_hand() -> None:
    """Of a triangle with equal sides the centre; where a point holds more than half of the weight, that point."""
    triangle = tensor([0, 0], [1, 0], [0.5, sqrt(3) / 2])
    torch.testing.assert_close(
        AGGREGATORS["geometric_median"].build().direction(cohort(triangle)).slice, tensor(0.5, sqrt(3) / 6)
    )
    skewed = AGGREGATORS["geometric_median"].build().direction(cohort(triangle, weights=[0.2, 0.2, 0.6])).slice
    torch.testing.assert_close(skewed, triangle[2], rtol=0, atol=1e-5)
    # The inner one of four points is their median, when it lies within the others' triangle.
    inside = (
        AGGREGATORS["geometric_median"]
        .build(iterations=1000)
        .direction(cohort(torch.cat([triangle, tensor([0.5, 0.3])])))
        .slice
    )
    torch.testing.assert_close(inside, tensor(0.5, 0.3), rtol=0, atol=1e-5)


def test_geometric_median_lowers_the_sum_of_distances_below_all_points_around() -> None:
    updates, weights = normal(7, 4), [0.1, 0.2, 0.1, 0.15, 0.15, 0.2, 0.1]
    shares = tensor(*weights)

    def total(point: Tensor) -> float:
        return float((shares * (updates - point).norm(dim=1)).sum())

    found = AGGREGATORS["geometric_median"].build(iterations=1000).direction(cohort(updates, weights=weights))
    assert found.diagnostics["geometric_median/iterations"] < 1000, "it converges"
    assert all(total(found.slice) <= total(found.slice + 1e-3 * step) for step in normal(50, 4, seed=1))


@pytest.mark.parametrize("iterations", [1, 2, 30])
def test_geometric_median_equals_its_twin(iterations: int) -> None:
    updates, weights = normal(6, 30, seed=3), [0.3, 0.1, 0.1, 0.2, 0.2, 0.1]
    found = GeometricMedian(0.01, iterations).direction(cohort(updates, weights=weights)).slice
    torch.testing.assert_close(found, geometric_median(updates, weights, 0.01, iterations))


def test_centered_clipping_by_hand() -> None:
    """Around 0 with radius 1: (3, 4) becomes (0.6, 0.8), (0, 0.5) stays. Then around their mean, (0.3, 0.65)."""
    updates, clipping = tensor([3, 4], [0, 0.5]), AGGREGATORS["centered_clipping"].build(radius=1.0)
    given = cohort(updates, weights=[0.5, 0.5])
    first = clipping.direction(given)
    torch.testing.assert_close(first.slice, tensor(0.3, 0.65))
    assert first.diagnostics == {"centered_clipping/clipped": 0.5}
    assert torch.equal(given.memory["centre"], first.slice)
    far = tensor(2.7, 3.35) / sqrt(2.7**2 + 3.35**2)
    expected = tensor(0.3, 0.65) + 0.5 * far + 0.5 * tensor(-0.3, -0.15)
    torch.testing.assert_close(clipping.direction(given).slice, expected)


@pytest.mark.parametrize(("radius", "iterations"), [(0.5, 1), (3.0, 4), (100.0, 2)])
def test_centered_clipping_around_what_came_before_equals_its_twin(radius: float, iterations: int) -> None:
    updates, centre, weights = normal(4, 20), normal(1, 20, seed=1)[0], [0.1, 0.2, 0.3, 0.4]
    found = CenteredClipping(radius, iterations).direction(cohort(updates, centre, weights=weights)).slice
    torch.testing.assert_close(found, centered_clipping(updates, centre, weights, radius, iterations))


def test_a_client_at_the_centre_is_left_there() -> None:
    found = AGGREGATORS["centered_clipping"].build(0.1).direction(cohort(tensor([1, 2], [1, 2]), tensor(1, 2)))
    assert torch.equal(found.slice, tensor(1, 2))
    assert found.diagnostics == {"centered_clipping/clipped": 0.0}


ROBUST = {
    "krum": {"byzantine": 0.3},
    "multi_krum": {"byzantine": 0.3},
    "geometric_median": {},
    "centered_clipping": {"radius": 1.0},
    "median": {},
    "trimmed_mean": {"trim": 0.3},
}


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("size", [1e2, 1e5])
def test_three_liars_of_ten_do_little(name: str, size: float) -> None:
    honest = 1 + 0.1 * normal(7, 30)
    lies = -size * torch.ones(3, 30).double()
    centre = honest.mean(0)
    found = AGGREGATORS[name].build(**ROBUST[name]).direction(cohort(torch.cat([lies, honest]), centre)).slice
    assert (found - honest.mean(0)).norm() < 1.1
    mean = AGGREGATORS["fedavg"].build().direction(cohort(torch.cat([lies, honest]))).slice
    assert (mean - honest.mean(0)).norm() > 50


@pytest.mark.parametrize("name", ["krum", "multi_krum"])
def test_weights_do_not_matter_to_krum(name: str) -> None:
    updates = normal(5, 10)
    fair, skewed = (
        AGGREGATORS[name].build().direction(cohort(updates, weights=weights)).slice
        for weights in ([0.2] * 5, [0.96, 0.01, 0.01, 0.01, 0.01])
    )
    assert torch.equal(fair, skewed)
