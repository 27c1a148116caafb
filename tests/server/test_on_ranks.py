"""Every aggregator and weighting on the matrix of a round, at 1, 2 and 3 ranks: dense arithmetic, and the same bits."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS, WEIGHTS
from fedspec_dist.core.cohort import Cohort, RowMatrix, Sketches
from fedspec_dist.core.parameters import Segment
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.update_matrix import ColumnSlicing, UpdateMatrix, exchange
from fedspec_dist.server.aggregators import fedgh, fedlws
from fedspec_dist.server.weights import fedawa
from tests.distributed.harness import run_ranks
from tests.reference import DenseRows, dense_cohort
from tests.server.test_weightings import Hills

LARGE = {"fedgh": fedgh, "fedlws": fedlws, "weights fedawa": fedawa}
# Five blocks of 1024 columns, the last one padded: neither 2 nor 3 ranks divide them.
K = 5
SEGMENTS = (
    Segment("conv.weight", (7, 3), 0, 21),
    Segment("blocks.0.conv2.weight", (15, 10, 3, 3), 21, 1350),
    Segment("blocks.1.conv1.weight", (15, 10, 3, 3), 1371, 1350),
    Segment("blocks.1.norm1.weight", (29,), 2721, 29),
    Segment("blocks.1.conv2.weight", (15, 10, 3, 3), 2750, 1350),
    Segment("fc.weight", (30, 30), 4100, 900),
)
P = SEGMENTS[-1].stop


def _rows(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, P, generator=torch.Generator().manual_seed(seed)) / 10


def dense_round() -> Cohort:
    cohort = dense_cohort(
        _rows(K, 0),
        _rows(1, 1)[0],
        num_samples=[10, 3, 40, 25, 7],
        class_counts=[[5, 5], [1, 2], [10, 30], [25, 0], [0, 7]],
        effective_steps=[2.9, 1.0, 5.61, 2.9, 1.9],
        segments=SEGMENTS,
        uploads={"fisher_diagonal": _rows(K, 2).square().mul(1e-4)},  # some below the threshold
        proxy=Hills(P),
        memory={"centre": _rows(1, 4)[0].double()},
        clip_norm=0.5,
    )
    sketches = Sketches(DenseRows(_rows(3, 3)), torch.tensor([3.0, 2, 1]).double(), torch.tensor([0, 0, 3]))
    return replace(cohort, sketches=sketches)


def spread(dense: Cohort, columns: Columns, collectives: Collectives) -> Cohort:
    """The same round, its columns on their ranks; client k was trained on rank `k % num_ranks`."""

    def matrix(rows: RowMatrix) -> UpdateMatrix:
        assert isinstance(rows, DenseRows)
        owners = [list(range(r, rows.num_rows, collectives.num_ranks)) for r in range(collectives.num_ranks)]
        mine = torch.zeros(len(owners[collectives.rank]), columns.padded)
        mine[:, :P] = rows.rows[owners[collectives.rank]].float()
        return UpdateMatrix(exchange(mine, owners, columns, collectives), columns, collectives)

    assert dense.sketches is not None
    return replace(
        dense,
        updates=matrix(dense.updates),
        slicing=ColumnSlicing(columns, collectives),
        sketches=replace(dense.sketches, rows=matrix(dense.sketches.rows)),
        uploads={name: matrix(rows) for name, rows in dense.uploads.items()},
        memory={name: columns.slice(vector, collectives.rank) for name, vector in dense.memory.items()},
    )


def _results(cohort: Cohort) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, method in AGGREGATORS.items():
        direction = method.build().direction(cohort)
        assert direction.slice.dtype == torch.float64
        found[name] = (cohort.slicing.whole(direction.slice), dict(direction.diagnostics))
    for name, method in WEIGHTS.items():
        weighting = method.build()
        state = weighting.initial_state(cohort.clients.num_samples)
        for _ in range(2):
            weights = weighting.weigh(cohort, state)
        found[f"weights {name}"] = (weights.values, {"shrink": weights.shrink, **weights.diagnostics})
    return found


def _as_of_many(cohort: Cohort) -> dict[str, Any]:
    """What is computed in another way for large cohorts, done so for this one."""
    with ExitStack() as stack:
        for module in LARGE.values():
            stack.enter_context(mock.patch.object(module, "_FEW", 0))
        found = _results(cohort)
    return {name: found[name] for name in LARGE}


def _on_ranks(collectives: Collectives) -> dict[str, Any]:
    return _results(spread(dense_round(), Columns.shared(P, collectives.num_ranks, K), collectives))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return _on_ranks(SingleProcess())


def test_one_rank_equals_dense_arithmetic(alone: dict[str, Any]) -> None:
    for name, (values, diagnostics) in _results(dense_round()).items():
        torch.testing.assert_close(alone[name][0], values, rtol=1e-9, atol=1e-9, msg=name)
        assert alone[name][1] == pytest.approx(diagnostics, rel=1e-6, abs=1e-6), name


def test_the_round_tells_the_methods_apart(alone: dict[str, Any]) -> None:
    names = sorted(alone)
    for kind in (True, False):
        family = [name for name in names if name.startswith("weights") == kind]
        for i, one in enumerate(family):
            for other in family[:i]:
                assert not torch.allclose(alone[one][0], alone[other][0], rtol=1e-3, atol=1e-6), (one, other)


def _many_on_ranks(collectives: Collectives) -> dict[str, Any]:
    return _as_of_many(spread(dense_round(), Columns.shared(P, collectives.num_ranks, K), collectives))


def test_large_cohorts_are_computed_in_another_way_with_the_same_result(alone: dict[str, Any], tmp_path: Path) -> None:
    many = _many_on_ranks(SingleProcess())
    for name, (values, diagnostics) in many.items():
        torch.testing.assert_close(values, alone[name][0], rtol=1e-9, atol=1e-9, msg=name)
        assert alone[name][1] == pytest.approx(diagnostics, rel=1e-6, abs=1e-6), name
    for found in run_ranks(_many_on_ranks, 3, tmp_path):
        for name, (values, diagnostics) in many.items():
            assert torch.equal(found[name][0], values), name
            assert found[name][1] == diagnostics, name


@pytest.mark.parametrize("name", ["fedlws", "weights fedawa"])
def test_a_thousand_and_more_clients_are_no_matrix_of_clients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError(f"{name} asked for K x K numbers")

    num, generator = 1500, torch.Generator().manual_seed(0)
    updates = torch.randn(num, P, generator=generator) / 10
    cohort = dense_cohort(updates, updates[0] + 1, num_samples=[3] * num, segments=SEGMENTS)
    monkeypatch.setattr(DenseRows, "gram", refuse)
    monkeypatch.setattr(DenseRows, "segment_grams", refuse)
    if name == "fedlws":
        assert AGGREGATORS[name].build().direction(cohort).slice.isfinite().all()
    else:
        weighting = WEIGHTS["fedawa"].build()
        values = weighting.weigh(cohort, weighting.initial_state(cohort.clients.num_samples)).values
        assert float(values.sum()) == pytest.approx(1)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_same_bits_on_any_number_of_ranks(num_ranks: int, tmp_path: Path, alone: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(_on_ranks, num_ranks, tmp_path)):
        for name, (values, diagnostics) in alone.items():
            assert torch.equal(found[name][0], values), f"{name} on rank {rank}"
            assert found[name][1] == diagnostics, f"{name} on rank {rank}"
