"""FedDisco's worked numbers and limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import WEIGHTS
from fedspec_dist.server.weights.feddisco import METRICS, discrepancies, divergences
from fedspec_dist.server.weights.shares import Samples
from tests.reference import dense_cohort, feddisco_weights

COUNTS = [[10, 0], [10, 30]]
EVEN = torch.ones(2)


def weights(counts: list[list[int]], test: list[int] | None = None, **parameters: object) -> Tensor:
    sizes = [sum(row) for row in counts]
    cohort = dense_cohort(torch.zeros(len(counts), 2), num_samples=sizes, class_counts=counts, test_class_counts=test)
    return WEIGHTS["feddisco"].build(**parameters).weigh(cohort, {}).values


def close(left: Tensor, right: list[float], tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, torch.tensor(right, dtype=torch.float64), rtol=0, atol=tolerance)


def test_worked_numbers() -> None:
    close(discrepancies(torch.tensor(COUNTS), "kl", EVEN), [0.8412396714, 0.1587603286])
    close(discrepancies(torch.tensor(COUNTS), "l2", EVEN), [0.7071067812, 0.3535533906])
    close(weights(COUNTS, a=0.1, b=0.1), [0.196250939, 0.803749061])
    close(weights(COUNTS), [0.0, 1.0])


def test_the_divergences_before_they_are_divided_by_their_sum() -> None:
    p = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    close(divergences(p, torch.full_like(p, 0.5)), [0.6931471806, 0.1308120359])
    # From (1/4, 3/4): log 4, and 0 exactly.
    close(divergences(p, p[1:].repeat(2, 1)), [1.3862943611, 0.0])


def test_other_metrics_by_hand() -> None:
    close(discrepancies(torch.tensor(COUNTS), "l1", EVEN), [1.0, 0.5])
    close(discrepancies(torch.tensor(COUNTS), "cosine", EVEN), [1 - 0.5**0.5, 1 - 2 / 5**0.5])
    close(discrepancies(torch.tensor([[1, 9], [5, 6]]), "only_iid", EVEN), [float("inf"), 0.01])


def test_the_sum_that_the_kl_is_divided_by_may_be_zero() -> None:
    assert discrepancies(torch.tensor([[5, 5], [2, 2]]), "kl", EVEN).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_without_a_and_b_exactly_the_shares(metric: str) -> None:
    # Shares whose sum is not exactly 1: dividing by it once more would be seen.
    counts = [[k + 1, 0] for k in range(16)]
    cohort = dense_cohort(torch.zeros(16, 2), num_samples=[k + 1 for k in range(16)], class_counts=counts)
    assert float(cohort.clients.shares.sum()) != 1
    expected = Samples().weigh(cohort, {}).values
    assert torch.equal(WEIGHTS["feddisco"].build(0.0, 0.0, metric).weigh(cohort, {}).values, expected)


def test_b_alone_is_not_the_shares() -> None:
    close(weights([[5, 5], [15, 15]], a=0.0, b=0.5), [(0.25 + 0.5) / 2, (0.75 + 0.5) / 2])


@pytest.mark.parametrize("metric", sorted(METRICS))
@pytest.mark.parametrize(("a", "b"), [(0.5, 0.1), (0.1, 0.1), (0.3, 0.0), (1.0, -0.05), (5.0, 0.0), (0.0, 0.2)])
def test_equals_its_twin(metric: str, a: float, b: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        counts = torch.randint(1, 40, (6, 4), generator=generator).tolist()
        # The twin would multiply an infinite discrepancy by 0.
        expected = feddisco_weights(counts, a, b, metric if a else "l2")
        close(weights(counts, a=a, b=b, metric=metric), expected, 1e-12)


@pytest.mark.parametrize("metric", sorted(METRICS))
@pytest.mark.parametrize("test", [[1, 1, 1, 1], [40, 20, 39, 1], [10, 0, 5, 5]])
def test_the_target_may_be_the_distribution_of_the_test_set(metric: str, test: list[int]) -> None:
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(1, 40, (6, 4), generator=generator)
    counts[:, 1] *= test[1] > 0
    expected = feddisco_weights(counts.tolist(), 0.3, 0.1, metric, [count / sum(test) for count in test])
    close(weights(counts.tolist(), test, a=0.3, metric=metric, target="test"), expected, 1e-12)


def test_a_balanced_test_set_is_the_uniform_target() -> None:
    counts = [[3, 0, 9], [4, 4, 1], [0, 0, 6]]
    assert torch.equal(weights(counts, [7, 7, 7], a=0.2, target="test"), weights(counts, a=0.2))


def test_a_class_that_the_test_set_lacks_is_infinitely_far() -> None:
    with pytest.raises(
        ValueError, match=r"^server\.weights\.target: got 'test' with metric 'kl', .* or target: uniform"
    ):
        weights(COUNTS, [5, 0], target="test")
    assert weights(COUNTS, [5, 0], target="test", metric="l1").sum() == 1
    assert weights([[4, 0], [2, 0]], [5, 0], target="test").tolist() == pytest.approx(
        [(2 / 3 + 0.1) / 1.2, (1 / 3 + 0.1) / 1.2]
    )


def test_equal_sizes_and_distributions_are_uniform() -> None:
    close(weights([[3, 5]] * 4), [0.25] * 4, 1e-15)


def test_where_nobody_counts_the_shares() -> None:
    close(weights(COUNTS, a=5.0, b=-1.0), [0.2, 0.8])
    close(weights([[4, 0]], a=5.0, b=0.0), [1.0])


def test_a_client_without_samples_does_not_count() -> None:
    values = weights([[0, 0], [10, 0], [10, 30]], a=0.1, b=0.1)
    close(values, [0.0, 0.196250939, 0.803749061])


def test_diagnostics() -> None:
    cohort = dense_cohort(torch.zeros(2, 2), num_samples=[10, 40], class_counts=COUNTS)
    assert WEIGHTS["feddisco"].build().weigh(cohort, {}).diagnostics == {"feddisco/dropped": 0.5}
