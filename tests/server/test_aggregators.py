"""What every aggregator has to satisfy, on one dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS
from fedspec_dist.core.cohort import Cohort, Sketches
from fedspec_dist.core.parameters import Segment
from fedspec_dist.server.protocols import Aggregator
from tests.reference import (
    DenseRows,
    centered_clipping,
    dense_cohort,
    fedgh_vectors,
    fedlws_model,
    fednova_update,
    fipa_dense,
    fisher_merge,
    geometric_median,
    inco_kernel,
    krum_order,
    median_columns,
    multi_krum_mean,
    trimmed_columns,
)

# A residual stage of two blocks with kernels of 2x2, and a linear layer.
SEGMENTS = (
    Segment("blocks.0.conv2.weight", (1, 1, 2, 2), 0, 4),
    Segment("blocks.1.conv1.weight", (1, 1, 2, 2), 4, 4),
    Segment("blocks.1.conv2.weight", (1, 1, 2, 2), 8, 4),
    Segment("fc.weight", (1, 2), 12, 2),
)
LAYERS = [(segment.start, segment.stop) for segment in SEGMENTS]
P = SEGMENTS[-1].stop


@dataclass(frozen=True)
class Problem:
    updates: Tensor
    weights: Tensor
    bases: tuple[Tensor, ...]
    eigenvalues: tuple[Tensor, ...]
    theta: Tensor
    fisher: Tensor
    steps: tuple[float, ...]

    def cohort(self) -> Cohort:
        owners = [torch.full((basis.shape[1],), k) for k, basis in enumerate(self.bases)]
        sketches = Sketches(DenseRows(torch.cat(self.bases, dim=1).T), torch.cat(self.eigenvalues), torch.cat(owners))
        cohort = dense_cohort(
            self.updates,
            self.theta,
            weights=self.weights.tolist(),
            effective_steps=self.steps,
            segments=SEGMENTS,
            uploads={"fisher_diagonal": self.fisher},
            memory={"centre": torch.zeros(P, dtype=torch.float64)},
        )
        return replace(cohort, sketches=sketches)

    def pick(self, order: list[int]) -> Problem:
        weights = self.weights[order]
        return replace(
            self,
            updates=self.updates[order],
            weights=weights / weights.sum(),
            bases=tuple(self.bases[k] for k in order),
            eigenvalues=tuple(self.eigenvalues[k] for k in order),
            fisher=self.fisher[order],
            steps=tuple(self.steps[k] for k in order),
        )


def problem(num_clients: int = 4, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ranks = [3, 1, 0, 4][:num_clients]
    weights = torch.rand(num_clients, generator=generator, dtype=torch.float64) + 0.1
    return Problem(
        0.1 * normal(num_clients, P),
        weights / weights.sum(),
        tuple(torch.linalg.qr(normal(P, rank)).Q for rank in ranks),
        tuple(normal(rank).abs().sort(descending=True).values for rank in ranks),
        normal(P),
        normal(num_clients, P).square() * (torch.arange(P) != 5),  # a parameter that nobody is sure of
        (4.0, 1.0, 2.5, 9.0)[:num_clients],
    )


def without_conflicts(given: Problem) -> Problem:
    return replace(given, updates=given.updates.abs())


def same_full_fisher(given: Problem) -> Problem:
    basis = torch.linalg.qr(torch.randn(P, P, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).Q
    values = torch.linspace(3, 1, P, dtype=torch.float64)
    num_clients = len(given.updates)
    return replace(given, bases=(basis,) * num_clients, eigenvalues=(values,) * num_clients)


def same_weights(given: Problem) -> Problem:
    return replace(given, weights=torch.full_like(given.weights, 1 / len(given.weights)))


def two_clients(given: Problem) -> Problem:
    return same_weights(given.pick([0, 1]))


def same_steps(given: Problem) -> Problem:
    return replace(given, steps=(7.0,) * len(given.steps))


def same_diagonals(given: Problem) -> Problem:
    return replace(given, fisher=(given.fisher[:1] + 0.1).expand(len(given.updates), -1).clone())


def expected_fipa(damping: float, factor: float) -> Callable[[Problem], Tensor]:
    return lambda p: factor * fipa_dense(p.bases, p.eigenvalues, p.updates, p.weights, damping)


def expected_fedlws(beta: float, min_tau: float, max_tau: float) -> Callable[[Problem], Tensor]:
    return lambda p: fedlws_model(p.updates, p.theta, p.weights.tolist(), LAYERS, beta, min_tau, max_tau) - p.theta


def expected_inco(p: Problem) -> Tensor:
    result = p.weights @ p.updates
    reference = result[:4].clone().reshape(2, 2)
    for start in (4, 8):
        kernel = result[start : start + 4].reshape(2, 2)
        result[start : start + 4] = inco_kernel(kernel, reference, 5.0).clamp(-0.1, 0.1).reshape(-1)
    return result


@dataclass(frozen=True)
class Case:
    """One setting of an aggregator; `fedavg_problem` turns a problem into one where it equals FedAvg."""

    name: str
    parameters: dict[str, object]
    expected: Callable[[Problem], Tensor]
    fedavg_problem: Callable[[Problem], Problem] | None = None
    exactly_fedavg: bool = False
    order_invariant: bool = True
    alone_fedavg: bool = True  # a single client's update is the direction
    diagnostics: bool = True  # it has scalars worth recording

    def build(self) -> Aggregator:
        return AGGREGATORS[self.name].build(**self.parameters)

    def direction(self, problem: Problem) -> Tensor:
        return self.build().direction(problem.cohort()).slice

    def __str__(self) -> str:
        return f"{self.name}{self.parameters}"


UNDAMPED = {"convention": "exact", "damping": 0, "step": 1}
CASES = [
    Case("fedavg", {}, lambda p: p.weights @ p.updates, lambda p: p, exactly_fedavg=True, diagnostics=False),
    *(
        Case(
            "fedgh",
            {"mode": mode},
            lambda p, mode=mode: p.weights @ fedgh_vectors(p.updates, mode),
            without_conflicts,
            exactly_fedavg=True,
            order_invariant=False,
        )
        for mode in ("pairwise", "snapshot")
    ),
    Case("fipa", {}, expected_fipa(0.5, 0.25), alone_fedavg=False),
    Case("fipa", {"merge": "tsqr", "damping": 0.1, "step": 2.0}, expected_fipa(0.1, 0.2), alone_fedavg=False),
    Case("fipa", {"convention": "exact", "damping": 0.1, "step": 1.0}, expected_fipa(0.1, 1.0), alone_fedavg=False),
    Case("fipa", UNDAMPED, expected_fipa(0, 1), same_full_fisher, alone_fedavg=False),
    Case("fipa", {"merge": "tsqr", **UNDAMPED}, expected_fipa(0, 1), same_full_fisher, alone_fedavg=False),
    Case("fednova", {}, lambda p: fednova_update(p.updates, p.weights.tolist(), p.steps), same_steps),
    Case("fedlws", {}, expected_fedlws(0.03, 0.01, 0.2), alone_fedavg=False),
    Case("fedlws", {"beta": 1.0, "max_tau": 0.15}, expected_fedlws(1.0, 0.01, 0.15), alone_fedavg=False),
    Case("fedlws", {"min_tau": 0.0, "max_tau": 0.0}, expected_fedlws(0.03, 0, 0), lambda p: p, exactly_fedavg=True),
    Case("inco", {}, expected_inco, alone_fedavg=False),
    Case(
        "fisher_diagonal",
        {},
        lambda p: fisher_merge(p.updates, p.fisher, p.weights.tolist(), p.theta) - p.theta,
        same_diagonals,
    ),
    Case("median", {}, lambda p: median_columns(p.updates), two_clients, diagnostics=False),
    Case("trimmed_mean", {"trim": 0.25}, lambda p: trimmed_columns(p.updates, len(p.updates) // 4), two_clients),
    Case("trimmed_mean", {"trim": 0.0}, lambda p: trimmed_columns(p.updates, 0), same_weights),
    Case("krum", {}, lambda p: p.updates[krum_order(p.updates, 0)[0]]),
    Case("multi_krum", {"byzantine": 0.0}, lambda p: multi_krum_mean(p.updates, 0), same_weights, exactly_fedavg=True),
    Case("multi_krum", {"byzantine": 0.25}, lambda p: multi_krum_mean(p.updates, len(p.updates) // 4)),
    Case("multi_krum", {"keep": 2}, lambda p: multi_krum_mean(p.updates, 0, keep=2)),
    Case("geometric_median", {}, lambda p: geometric_median(p.updates, p.weights.tolist(), 1e-6, 100)),
    Case(
        "geometric_median",
        {"smoothing": 1e6, "iterations": 3},
        lambda p: geometric_median(p.updates, p.weights.tolist(), 1e6, 3),
        lambda p: p,
    ),
    Case(
        "centered_clipping",
        {"radius": 0.1, "iterations": 2},
        lambda p: centered_clipping(p.updates, torch.zeros(P).double(), p.weights.tolist(), 0.1, 2),
        alone_fedavg=False,
    ),
    Case(
        "centered_clipping",
        {"radius": 1e6},
        lambda p: centered_clipping(p.updates, torch.zeros(P).double(), p.weights.tolist(), 1e6, 1),
        lambda p: p,
    ),
]
every_aggregator = pytest.mark.parametrize("case", CASES, ids=str)
has_fedavg_limit = pytest.mark.parametrize("case", [case for case in CASES if case.fedavg_problem], ids=str)


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
    found = torch.allclose(case.direction(alone), alone.updates[0], rtol=1e-12, atol=1e-12)
    assert found == case.alone_fedavg


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
    assert case.fedavg_problem is not None
    given = case.fedavg_problem(problem())
    fedavg = AGGREGATORS["fedavg"].build().direction(given.cohort()).slice
    result = case.direction(given)
    if case.exactly_fedavg:
        assert torch.equal(result, fedavg)
    else:
        close(result, fedavg)


@every_aggregator
def test_diagnostics_carry_the_name_as_prefix(case: Case) -> None:
    diagnostics = case.build().direction(problem().cohort()).diagnostics
    assert all(key.startswith(f"{case.name}/") and isinstance(diagnostics[key], float) for key in diagnostics)
    assert bool(diagnostics) == case.diagnostics


@every_aggregator
def test_needs_are_announced(case: Case) -> None:
    without = {
        "sketches": replace(problem().cohort(), sketches=None),
        "fisher_diagonal": replace(problem().cohort(), uploads={}),
    }
    for name, bare in without.items():
        if name in AGGREGATORS[case.name].needs:
            with pytest.raises((AssertionError, ValueError), match=rf"{case.name} needs|no client sent '{name}'"):
                case.build().direction(bare)
        else:
            close(case.build().direction(bare).slice, case.expected(problem()))
