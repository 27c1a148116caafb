"""Transforms of a round's updates: combinations that nobody makes, against dense ones; clip, fedgh and noise."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS, TRANSFORMS
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.server.transforms.mixed import Mixed, Term, as_mixed, mix
from fedspec_dist.server.transforms.privacy import Clip, Noise
from tests.distributed.harness import run_ranks
from tests.reference import DenseRows, dense_cohort, fedgh_vectors
from tests.server.test_on_ranks import SEGMENTS, K, P, dense_round, spread

LAYERS = [(segment.start, segment.stop) for segment in SEGMENTS]


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------ combinations


def _mixtures(cohort: Cohort) -> dict[str, Cohort]:
    """Diagonals, matrices, one after the other, and with a vector added to all rows."""
    diagonal, full = normal(K, seed=1), normal(K, K, seed=2)
    extra = cohort.slicing.rows(cohort.slicing.slice(normal(2, P, seed=3)[0]).unsqueeze(0))
    shifted = as_mixed(mix(cohort, full)).plus(Term(normal(K, 1, seed=4), extra))
    return {
        "identity": replace(cohort, updates=as_mixed(cohort)),
        "diagonal": mix(cohort, diagonal),
        "matrix": mix(cohort, full),
        "diagonals": mix(mix(cohort, diagonal), diagonal),
        "matrix of a diagonal": mix(mix(cohort, diagonal), full),
        "diagonal of a matrix": mix(mix(cohort, full), diagonal),
        "shifted": replace(cohort, updates=shifted),
        "matrix of shifted": mix(replace(cohort, updates=shifted), normal(K, K, seed=5)),
    }


def _dense_mixtures() -> dict[str, DenseRows]:
    u, diagonal, full = dense_round().updates.rows, torch.diag(normal(K, seed=1)), normal(K, K, seed=2)
    shifted = full @ u + normal(K, 1, seed=4) @ normal(2, P, seed=3)[:1]
    made = {
        "identity": u,
        "diagonal": diagonal @ u,
        "matrix": full @ u,
        "diagonals": diagonal @ diagonal @ u,
        "matrix of a diagonal": full @ diagonal @ u,
        "diagonal of a matrix": diagonal @ full @ u,
        "shifted": shifted,
        "matrix of shifted": normal(K, K, seed=5) @ shifted,
    }
    return {name: DenseRows(rows) for name, rows in made.items()}


def _asked(matrix: Any, cohort: Cohort, other: Any) -> dict[str, Tensor]:
    """All that can be asked of a matrix."""
    whole = cohort.slicing.whole
    theta = cohort.slicing.slice(cohort.theta)
    assert cohort.sketches is not None
    r = matrix.qr_r()
    return {
        "gram": matrix.gram(),
        "segment_grams": matrix.segment_grams(LAYERS),
        "segment_dots": matrix.segment_dots(LAYERS, theta),
        "segment_squares": matrix.segment_squares(LAYERS),
        "inner": matrix.inner(cohort.sketches.rows),
        "inner from outside": cohort.sketches.rows.inner(matrix),
        "inner with another": matrix.inner(other),
        "combine": whole(matrix.combine(normal(K, seed=6))),
        "columnwise": whole(matrix.columnwise(lambda u: u.amax(0))),
        "columnwise with others": whole(
            matrix.columnwise(lambda u, f, o: (u * f + o).amax(0), cohort.uploads["fisher_diagonal"], other)
        ),
        "dot": matrix.dot(theta),
        "norms": matrix.norms(),
        "qr": r.T @ r,
        "combine_q": whole(matrix.combine_q(r @ normal(K, seed=7))),
        "zeros": whole(matrix.zeros()),
    }


def _mixtures_on_ranks(collectives: Collectives) -> dict[str, Any]:
    cohort = spread(dense_round(), Columns.shared(P, collectives.num_ranks, K), collectives)
    mixtures = _mixtures(cohort)
    return {name: _asked(mixture.updates, cohort, mixtures["shifted"].updates) for name, mixture in mixtures.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return _mixtures_on_ranks(SingleProcess())


def test_combinations_are_what_dense_arithmetic_makes(alone: dict[str, Any]) -> None:
    dense = _dense_mixtures()
    assert alone.keys() == dense.keys()
    for name, matrix in dense.items():
        for what, expected in _asked(matrix, dense_round(), dense["shifted"]).items():
            torch.testing.assert_close(alone[name][what], expected, rtol=1e-9, atol=1e-9, msg=f"{what} of {name}")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_combinations_have_the_same_bits_on_any_number_of_ranks(
    num_ranks: int, tmp_path: Path, alone: dict[str, Any]
) -> None:
    for rank, found in enumerate(run_ranks(_mixtures_on_ranks, num_ranks, tmp_path)):
        for name, asked in alone.items():
            for what, expected in asked.items():
                assert torch.equal(found[name][what], expected), f"{what} of {name} on rank {rank}"


def test_the_identity_leaves_a_round_as_it_is() -> None:
    cohort = dense_round()
    assert mix(cohort, torch.ones(K).double()) is cohort
    assert mix(cohort, torch.eye(K).double()) is cohort
    assert isinstance(mix(cohort, -torch.eye(K).double()).updates, Mixed)


# ------------------------------------------------------------------------------------------ every transform


def apply(name: str, cohort: Cohort, **parameters: Any) -> tuple[Cohort, dict[str, float]]:
    transform = TRANSFORMS[name].build(**parameters)
    result = transform.apply(cohort, transform.initial_state(cohort.clients.population))
    return result.cohort, dict(result.diagnostics)


def rows(cohort: Cohort) -> Tensor:
    return torch.stack([cohort.updates.combine(unit) for unit in torch.eye(cohort.updates.num_rows).double()])


def _clipped(updates: Tensor, norm: float) -> Tensor:
    return torch.stack([u * min(1.0, norm / float(u.norm())) if u.any() else u for u in updates])


# name, parameters -> what becomes of the rows; noise has tests of its own
DENSE = {
    ("clip", "norm", 0.7): lambda u: _clipped(u, 0.7),
    ("clip", "norm", 1e6): lambda u: u,
    ("fedgh", "mode", "pairwise"): lambda u: fedgh_vectors(u, "pairwise"),
    ("fedgh", "mode", "snapshot"): lambda u: fedgh_vectors(u, "snapshot"),
}


@pytest.mark.parametrize("case", DENSE, ids=str)
@pytest.mark.parametrize(
    "updates",
    [
        normal(4, 6) / 3,
        normal(1, 6),
        normal(1, 6).expand(4, -1),
        torch.zeros(3, 6).double(),
        torch.cat([normal(2, 6), torch.zeros(1, 6).double()]),
    ],
    ids=["random", "one client", "equal updates", "zero updates", "one zero"],
)
def test_a_transform_equals_its_dense_twin(case: tuple[str, str, Any], updates: Tensor) -> None:
    name, parameter, value = case
    cohort, diagnostics = apply(name, dense_cohort(updates), **{parameter: value})
    torch.testing.assert_close(rows(cohort), DENSE[case](updates), rtol=1e-12, atol=1e-12)
    assert diagnostics
    assert all(key.startswith(f"{name}/") and isinstance(value, float) for key, value in diagnostics.items())


def test_the_tables_cover_every_transform() -> None:
    assert {name for name, _, _ in DENSE} | {"noise"} == set(TRANSFORMS)


def test_clip_by_hand() -> None:
    cohort, diagnostics = apply("clip", dense_cohort(tensor([3, 4], [0.3, 0.4], [0, -2])), norm=1.0)
    torch.testing.assert_close(rows(cohort), tensor([0.6, 0.8], [0.3, 0.4], [0, -1]))
    assert diagnostics == {"clip/share": 2 / 3, "clip/norm_median": 2.0}
    assert cohort.clip_norm == 1.0


@pytest.mark.parametrize("mode", ["pairwise", "snapshot"])
@pytest.mark.parametrize("seed", range(5))
def test_fedgh_before_fedavg_is_the_aggregator_fedgh_bit_for_bit(mode: str, seed: int) -> None:
    updates, weights = normal(6, 40, seed=seed), normal(6, seed=seed).square()
    cohort = dense_cohort(updates, weights=(weights / weights.sum()).tolist())
    transformed, diagnostics = apply("fedgh", cohort, mode=mode)
    expected = AGGREGATORS["fedgh"].build(mode=mode).direction(cohort)
    assert torch.equal(AGGREGATORS["fedavg"].build().direction(transformed).slice, expected.slice)
    assert diagnostics == expected.diagnostics
    assert diagnostics["fedgh/conflict_ratio"] > 0


def test_fedgh_before_fednova_normalises_the_harmonized_updates() -> None:
    updates, steps = tensor([1, 0], [-1, 1]), [1.0, 4.0]
    cohort, _ = apply("fedgh", dense_cohort(updates, weights=[0.5, 0.5], effective_steps=steps))
    # Harmonized: (0.5, 0.5) and (0, 1). Per step (0.5, 0.5) and (0, 0.25); tau = 2.5.
    found = AGGREGATORS["fednova"].build().direction(cohort).slice
    torch.testing.assert_close(found, 2.5 * (0.5 * tensor(0.5, 0.5) + 0.5 * tensor(0, 0.25)))


def test_permuted_clients_are_clipped_alike() -> None:
    updates, order = normal(4, 6), [2, 0, 3, 1]
    straight, _ = apply("clip", dense_cohort(updates))
    permuted, _ = apply("clip", dense_cohort(updates[order]))
    torch.testing.assert_close(rows(permuted), rows(straight)[order])


@pytest.mark.parametrize("aggregator", [name for name in AGGREGATORS if name != "fipa"])
def test_every_aggregator_sees_the_transformed_updates(aggregator: str) -> None:
    """Its direction is that of a round in which the clients had sent these rows."""
    given = dense_round()
    for name in ("clip", "fedgh"):
        cohort, _ = apply(name, given)
        sent = replace(cohort, updates=DenseRows(rows(cohort)))
        found, expected = (
            AGGREGATORS[aggregator].build().direction(replace(c, memory={"centre": given.memory["centre"].clone()}))
            for c in (cohort, sent)
        )
        torch.testing.assert_close(found.slice, expected.slice, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(dict(found.diagnostics), dict(expected.diagnostics), rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------ noise


def noisy(cohort: Cohort, seed: int = 0, round_index: int = 0, **parameters: Any) -> Tensor:
    cohort, _ = apply("noise", replace(cohort, seed=seed, round_index=round_index, clip_norm=2.0), **parameters)
    return rows(cohort)


def test_noise_is_one_gaussian_vector_of_the_right_size() -> None:
    updates = normal(4, 20000)
    cohort = replace(dense_cohort(updates, weights=[0.1, 0.2, 0.3, 0.4]), clip_norm=2.0)
    added = noisy(cohort, multiplier=0.5) - updates
    assert (added - added[0]).abs().max() < 1e-12, "the same for every client"
    std = 0.5 * 2.0 * 0.4
    assert added[0].std().item() == pytest.approx(std, rel=4 / sqrt(2 * 20000))
    assert abs(added[0].mean().item()) < 4 * std / sqrt(20000)
    assert apply("noise", cohort, multiplier=0.5)[1] == {"noise/std": pytest.approx(std)}


def test_noise_is_keyed_by_seed_and_round_and_differs_between_blocks() -> None:
    cohort = dense_cohort(torch.zeros(2, 2048).double())
    first = noisy(cohort)[0]
    assert torch.equal(noisy(cohort)[0], first)
    assert not torch.equal(first[:1024], first[1024:])
    for other in (noisy(cohort, seed=1), noisy(cohort, round_index=1)):
        assert not (other[0] == first).any()


def test_no_noise_is_nothing_bit_for_bit() -> None:
    cohort = replace(dense_cohort(normal(3, 50)), clip_norm=1.0)
    assert apply("noise", cohort, multiplier=0.0)[0] is cohort


@pytest.mark.parametrize("aggregator", ["fedavg", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"])
def test_aggregators_that_move_with_their_points_move_by_the_noise(aggregator: str) -> None:
    cohort = replace(dense_cohort(normal(7, 50)), clip_norm=1.0)
    transformed, _ = apply("noise", cohort, multiplier=2.0)
    before, after = (AGGREGATORS[aggregator].build().direction(c).slice for c in (cohort, transformed))
    torch.testing.assert_close(after - before, rows(transformed)[0] - rows(cohort)[0], rtol=1e-6, atol=1e-6)


def _chain(collectives: Collectives) -> dict[str, Tensor]:
    """Whole chains before aggregators of all kinds."""
    cohort = spread(dense_round(), Columns.shared(P, collectives.num_ranks, K), collectives)
    for transform in (Clip(3.0), TRANSFORMS["fedgh"].build(), TRANSFORMS["noise"].build(0.1)):
        cohort = transform.apply(cohort, transform.initial_state(K)).cohort
    found = {}
    for name, entry in AGGREGATORS.items():
        memory = {key: value.clone() for key, value in cohort.memory.items()}
        found[name] = cohort.slicing.whole(entry.build().direction(replace(cohort, memory=memory)).slice)
    return found


def test_a_chain_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = _chain(SingleProcess())
    for num_ranks in (2, 3):
        for rank, found in enumerate(run_ranks(_chain, num_ranks, tmp_path)):
            for name, direction in expected.items():
                assert torch.equal(found[name], direction), f"{name} on rank {rank} of {num_ranks}"


# ------------------------------------------------------------------------------------------ what is refused


def test_only_an_account_asks_for_the_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspec_dist.server.transforms.privacy.find_spec", lambda name: None)
    TRANSFORMS["noise"].build(1.0)
    with pytest.raises(ValueError, match=r"^server\.transforms\.delta: .*pip install dp-accounting"):
        Noise(1.0, delta=1e-5)
