"""What every aggregator has to satisfy, on one dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedspec_dist.methods import AGGREGATORS
from fedspec_dist.server.cohort import Aggregator, Cohort, Sketches
from tests.reference import DenseRows, fedgh_vectors, fipa_dense

P = 12


@dataclass(frozen=True)
class Problem:
    updates: Tensor
    weights: Tensor
    bases: tuple[Tensor, ...]
    eigenvalues: tuple[Tensor, ...]

    def cohort(self) -> Cohort:
        owners = [torch.full((basis.shape[1],), k) for k, basis in enumerate(self.bases)]
        sketches = Sketches(DenseRows(torch.cat(self.bases, dim=1).T), torch.cat(self.eigenvalues), torch.cat(owners))
        return Cohort(DenseRows(self.updates), self.weights, sketches)

    def pick(self, order: list[int]) -> Problem:
        weights = self.weights[order]
        return Problem(
            self.updates[order],
            weights / weights.sum(),
            tuple(self.bases[k] for k in order),
            tuple(self.eigenvalues[k] for k in order),
        )


@dataclass(frozen=True)
class Case:
    """One setting of an aggregator; `fedavg_problem` turns a problem into one where it equals FedAvg."""

    name: str
    parameters: dict[str, object]
    expected: Callable[[Problem], Tensor]
    order_invariant: bool = True
    like_fedavg: Callable[[Problem], Problem] = lambda problem: problem

    def build(self) -> Aggregator:
        return AGGREGATORS[self.name].build(**self.parameters)

    def direction(self, problem: Problem) -> Tensor:
        return self.build().direction(problem.cohort()).slice


def problem(num_clients: int = 4, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ranks = [3, 1, 0, 4][:num_clients]
    weights = torch.rand(num_clients, generator=generator, dtype=torch.float64) + 0.1
    return Problem(
        normal(num_clients, P),
        weights / weights.sum(),
        tuple(torch.linalg.qr(normal(P, rank)).Q for rank in ranks),
        tuple(normal(rank).abs().sort(descending=True).values for rank in ranks),
    )


def without_conflicts(given: Problem) -> Problem:
    return replace(given, updates=given.updates.abs())


def same_full_fisher(given: Problem) -> Problem:
    basis = torch.linalg.qr(torch.randn(P, P, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).Q
    values = torch.linspace(3, 1, P, dtype=torch.float64)
    num_clients = len(given.updates)
    return replace(given, bases=(basis,) * num_clients, eigenvalues=(values,) * num_clients)


def expected_fipa(damping: float, factor: float) -> Callable[[Problem], Tensor]:
    return lambda p: factor * fipa_dense(p.bases, p.eigenvalues, p.updates, p.weights, damping)


CASES = [
    Case("fedavg", {}, lambda p: p.weights @ p.updates),
    Case(
        "fedgh",
        {},
        lambda p: p.weights @ fedgh_vectors(p.updates, "pairwise"),
        order_invariant=False,
        like_fedavg=without_conflicts,
    ),
    Case(
        "fedgh",
        {"mode": "snapshot"},
        lambda p: p.weights @ fedgh_vectors(p.updates, "snapshot"),
        order_invariant=False,
        like_fedavg=without_conflicts,
    ),
    Case("fipa", {}, expected_fipa(0.5, 0.25)),
    Case("fipa", {"merge": "tsqr", "damping": 0.1, "step": 2.0}, expected_fipa(0.1, 0.2)),
    Case("fipa", {"convention": "exact", "damping": 0.1, "step": 1.0}, expected_fipa(0.1, 1.0)),
    Case(
        "fipa",
        {"convention": "exact", "damping": 0, "step": 1},
        expected_fipa(0, 1),
        like_fedavg=same_full_fisher,
    ),
    Case(
        "fipa",
        {"convention": "exact", "damping": 0, "step": 1, "merge": "tsqr"},
        expected_fipa(0, 1),
        like_fedavg=same_full_fisher,
    ),
]
every_aggregator = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}{case.parameters}")
has_fedavg_limit = pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name != "fipa" or case.parameters.get("damping") == 0],
    ids=lambda case: f"{case.name}{case.parameters}",
)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_table_covers_every_aggregator() -> None:
    assert {case.name for case in CASES} == set(AGGREGATORS)


@every_aggregator
@pytest.mark.parametrize("seed", range(5))
def test_equals_its_dense_twin(case: Case, seed: int) -> None:
    result = case.direction(problem(seed=seed))
    assert (result.dtype, result.shape) == (torch.float64, (P,))
    close(result, case.expected(problem(seed=seed)))


@every_aggregator
def test_one_client(case: Case) -> None:
    alone = problem().pick([0])
    close(case.direction(alone), case.expected(alone))


@every_aggregator
def test_equal_updates(case: Case) -> None:
    given = problem()
    equal = replace(given, updates=given.updates[:1].expand(4, -1).clone())
    close(case.direction(equal), case.expected(equal))


@every_aggregator
def test_zero_updates_do_not_move(case: Case) -> None:
    given = problem()
    assert not case.direction(replace(given, updates=torch.zeros(4, P, dtype=torch.float64))).any()


@every_aggregator
def test_permuted_clients(case: Case) -> None:
    given = problem()
    if case.order_invariant:
        close(case.direction(given.pick([2, 0, 3, 1])), case.direction(given))
    else:
        assert (case.direction(given.pick([2, 0, 3, 1])) - case.direction(given)).norm() > 1e-6


@has_fedavg_limit
def test_degenerate_setting_equals_fedavg(case: Case) -> None:
    given = case.like_fedavg(problem())
    fedavg = AGGREGATORS["fedavg"].build().direction(given.cohort()).slice
    result = case.direction(given)
    if case.name == "fipa":
        close(result, fedavg)
    else:
        assert torch.equal(result, fedavg)


@every_aggregator
def test_diagnostics_carry_the_name_as_prefix(case: Case) -> None:
    diagnostics = case.build().direction(problem().cohort()).diagnostics
    assert all(key.startswith(f"{case.name}/") and isinstance(diagnostics[key], float) for key in diagnostics)
    assert bool(diagnostics) == (case.name != "fedavg")


@every_aggregator
def test_sketches_are_needed_where_announced(case: Case) -> None:
    cohort = replace(problem().cohort(), sketches=None)
    if case.build().needs_sketches:
        with pytest.raises(AssertionError, match="needs sketches"):
            case.build().direction(cohort)
    else:
        close(case.build().direction(cohort).slice, case.expected(problem()))
