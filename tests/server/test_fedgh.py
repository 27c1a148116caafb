"""FedGH's worked numbers, properties and rounding."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch
from torch import Tensor

from fedspec_dist.server.aggregators.fedgh import MODES, conflict_ratio, harmonize, harmonized_sum
from tests.reference import fedgh_vectors

both_modes = pytest.mark.parametrize("mode", MODES)
THREE = [[1.0, 0, 0], [-1, 1, 0], [-1, -1, 1]]


def vectors(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def harmonized(updates: Tensor, mode: str) -> Tensor:
    return harmonize(updates @ updates.T, mode) @ updates


def random_updates(num_clients: int, num_parameters: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_clients, num_parameters, generator=generator, dtype=torch.float64)


@both_modes
def test_two_clients(mode: str) -> None:
    result = harmonized(vectors([[1, 0], [-1, 1]]), mode)
    torch.testing.assert_close(result, vectors([[0.5, 0.5], [0, 1]]))
    # Projecting on the other's already changed vector leaves it alone: the mean would be (-0.25, 0.75).
    torch.testing.assert_close(result.mean(0), vectors([[0.25, 0.75]])[0])


@pytest.mark.parametrize(
    ("mode", "third", "mean"),
    [
        ("pairwise", [0.0, 0, 1], [1 / 18, 7 / 18, 4 / 9]),
        ("snapshot", [0.0, -1, 1], [1 / 18, 1 / 18, 4 / 9]),
    ],
)
def test_three_clients(mode: str, third: list[float], mean: list[float]) -> None:
    result = harmonized(vectors(THREE), mode)
    torch.testing.assert_close(result, vectors([[1 / 6, 1 / 6, 1 / 3], [0, 1, 0], third]))
    torch.testing.assert_close(result.mean(0), vectors([mean])[0])


def test_reversed_order_changes_pairwise_only() -> None:
    backward = {mode: harmonized(vectors(THREE).flip(0), mode).flip(0) for mode in MODES}
    torch.testing.assert_close(backward["pairwise"][1:], vectors([[0, 0.5, 0.5], [0, -1, 1]]))
    torch.testing.assert_close(backward["snapshot"], harmonized(vectors(THREE), "snapshot"))


@both_modes
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("num_clients", "num_parameters"), [(2, 5), (6, 3), (9, 40)])
def test_equals_projecting_the_vectors(mode: str, seed: int, num_clients: int, num_parameters: int) -> None:
    updates = random_updates(num_clients, num_parameters, seed)
    torch.testing.assert_close(harmonized(updates, mode), fedgh_vectors(updates, mode), rtol=1e-10, atol=1e-10)


@both_modes
@pytest.mark.parametrize("num_clients", [0, 1, 5])
def test_without_conflict_exactly_the_identity(mode: str, num_clients: int) -> None:
    updates = random_updates(num_clients, 7, 0).abs()
    coefficients = harmonize(updates @ updates.T, mode)
    assert coefficients.dtype == torch.float64
    assert torch.equal(coefficients, torch.eye(num_clients, dtype=torch.float64))


@both_modes
def test_orthogonal_updates_are_no_conflict(mode: str) -> None:
    for seed in range(20):
        updates = (random_updates(8, 12, seed) > 0.6).double()
        coefficients = harmonize(updates @ updates.T, mode)
        assert torch.equal(coefficients, torch.eye(8, dtype=torch.float64)), f"seed {seed}"


@both_modes
@pytest.mark.parametrize(("num_clients", "num_parameters"), [(4, 10), (6, 4), (6, 40)])
def test_orthogonal_pairs_among_conflicting_ones(mode: str, num_clients: int, num_parameters: int) -> None:
    # Entries of -1, 0 and 1: inner products are exact, and many are exactly zero.
    for seed in range(40):
        updates = random_updates(num_clients, num_parameters, seed).round().clamp(-1, 1)
        expected = fedgh_vectors(updates, mode)
        torch.testing.assert_close(harmonized(updates, mode), expected, rtol=1e-9, atol=1e-9, msg=f"seed {seed}")


@pytest.mark.parametrize("seed", range(5))
def test_after_a_pair_the_two_agree(seed: int) -> None:
    left, right = random_updates(2, 30, seed)
    right = right - 2 * abs(left @ right) / (left @ left) * left
    updates = torch.stack([left, right])
    new = harmonized(updates, "pairwise")
    inner, squared = left @ right, (left @ left) * (right @ right)
    assert float(new[0] @ new[1]) == pytest.approx(float(-inner * (1 - inner**2 / squared)))
    torch.testing.assert_close((new * updates.flip(0)).sum(1), torch.zeros(2).double(), rtol=0, atol=1e-12)
    assert (updates @ new.sum(0) >= -1e-12).all()


@both_modes
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_antiparallel_updates_cancel_and_disturb_nobody(mode: str, scale: float) -> None:
    pair = random_updates(1, 20, 1)
    others = random_updates(3, 20, 2)
    updates = scale * torch.cat([pair, -pair, others])
    result = harmonized(updates, mode)
    if mode == "pairwise":
        assert result[:2].norm() < 1e-7 * scale
        torch.testing.assert_close(result[2:], harmonized(scale * others, mode), rtol=1e-7, atol=1e-7 * scale)
    assert result.norm() < 2 * updates.norm()
    assert harmonize(updates @ updates.T, mode).abs().max() < 10


@both_modes
@pytest.mark.parametrize("num_parameters", [1, 2, 3])
def test_more_clients_than_parameters(mode: str, num_parameters: int) -> None:
    # Running vectors shrink by orders of magnitude here, or cancel: what is left of those is rounding noise.
    for seed in range(150):
        updates = random_updates(8, num_parameters, seed)
        error = harmonized(updates, mode) - fedgh_vectors(updates, mode)
        assert error.abs().max() < 1e-8, f"seed {seed}"


@both_modes
@pytest.mark.parametrize("num_parameters", [1, 2, 20])
def test_coefficients_do_not_depend_on_the_scale(mode: str, num_parameters: int) -> None:
    for seed in range(30):
        updates = random_updates(8, num_parameters, seed)
        gram = updates @ updates.T
        assert torch.equal(harmonize(2.0**40 * gram, mode), harmonize(gram, mode)), f"seed {seed}"


@both_modes
def test_small_updates_keep_their_directions(mode: str) -> None:
    updates = random_updates(6, 30, 4) * torch.logspace(0, -9, 6, dtype=torch.float64).unsqueeze(1)
    result, expected = harmonized(updates, mode), fedgh_vectors(updates, mode)
    assert (conflict_ratio(updates @ updates.T)) > 0
    torch.testing.assert_close(result / updates.norm(dim=1, keepdim=True), expected / updates.norm(dim=1, keepdim=True))


@both_modes
def test_zero_updates_are_left_alone(mode: str) -> None:
    updates = vectors([[0, 0], [1, 0], [-1, 0], [0, 0]])
    torch.testing.assert_close(harmonized(updates, mode), torch.zeros(4, 2).double())


@both_modes
def test_directions_below_the_threshold_are_skipped(mode: str) -> None:
    tiny = vectors([[1, 0], [-1e-13, 0]])
    torch.testing.assert_close(harmonized(tiny, mode)[0], vectors([[1, 0]])[0])


@both_modes
def test_a_hundred_clients_take_little_time(mode: str) -> None:
    updates = random_updates(100, 50, 3)
    start = time.process_time()
    harmonize(updates @ updates.T, mode)
    assert time.process_time() - start < 1.0


@both_modes
@pytest.mark.parametrize(("num_clients", "num_parameters"), [(5, 40), (40, 7), (150, 20), (150, 300), (300, 2)])
def test_the_sum_of_the_harmonized_updates(mode: str, num_clients: int, num_parameters: int) -> None:
    updates = random_updates(num_clients, num_parameters, 5)
    weights = torch.arange(1.0, num_clients + 1, dtype=torch.float64)
    weights /= weights.sum()
    mean = harmonized_sum(updates @ updates.T, weights, mode) @ updates
    torch.testing.assert_close(mean, weights @ fedgh_vectors(updates, mode), rtol=1e-9, atol=1e-9)


@both_modes
@pytest.mark.parametrize("num_clients", [1, 5, 150])
def test_the_sum_without_conflict_is_exactly_the_weights(mode: str, num_clients: int) -> None:
    updates, weights = random_updates(num_clients, 7, 0).abs(), torch.rand(num_clients, dtype=torch.float64)
    assert torch.equal(harmonized_sum(updates @ updates.T, weights, mode), weights)


@both_modes
def test_a_thousand_clients_of_a_small_model_take_little_time_and_one_more_matrix_at_most(mode: str) -> None:
    updates = random_updates(1000, 130, 3)
    gram, weights = updates @ updates.T, torch.full((1000,), 1e-3, dtype=torch.float64)
    tracemalloc.start()
    start = time.process_time()
    harmonized_sum(gram, weights, mode)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 4.0  # 0.4 alone on a quiet machine, 2.1 before
    assert peak < 8 * 1000**2  # beside the Gram matrix itself, which is as large


def test_conflict_ratio() -> None:
    updates = vectors(THREE)
    assert conflict_ratio(updates @ updates.T) == pytest.approx(2 / 3)
    assert conflict_ratio(updates[:1] @ updates[:1].T) == 0.0


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"server\.aggregator\.mode: 'both' is not one of pairwise, snapshot"):
        harmonize(torch.eye(2), "both")
    with pytest.raises(ValueError, match="Gram matrix of the updates has entries that are not finite"):
        harmonize(torch.full((2, 2), float("nan")))
