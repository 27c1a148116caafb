"""What every weighting has to satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import WEIGHTS
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.protocols import Weighting, Weights
from tests.reference import dense_cohort

N, P = 9, 30


@dataclass(frozen=True)
class Case:
    """One setting of a weighting."""

    name: str
    parameters: dict[str, object]
    shrinks: bool = False  # the model as a whole
    diagnostics: bool = True  # it has scalars worth recording

    def __str__(self) -> str:
        return f"{self.name}{self.parameters}"


CASES = [
    Case("uniform", {}, diagnostics=False),
    Case("samples", {}, diagnostics=False),
    *(Case("feddisco", {"metric": metric}) for metric in ("kl", "l2", "l1", "cosine", "only_iid")),
    Case("feddisco", {"target": "test"}),
    Case("fedawa", {}),
    Case("fedawa", {"optimizer": "sgd", "lr": 0.1, "server_epochs": 3, "stale": True, "weight_decay": 0.1}),
    Case("fedlaw", {"epochs": 3}, shrinks=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_weighting = pytest.mark.parametrize(
    ("name", "parameters"), [(case.name, case.parameters) for case in CASES], ids=str
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Hills:
    """A loss that is not a parabola: two batches an epoch, in an order that depends on it."""

    num_columns: int = P

    def batches(self, epoch: int) -> Sequence[Tensor]:
        return [torch.tensor([epoch % 2]), torch.tensor([2, 3])]

    def loss(self, theta: Tensor, batch: Tensor) -> Tensor:
        targets = normal(4, self.num_columns, seed=11).to(theta)[batch]
        return (theta - targets).square().sum(1).add(1).log().mean()

    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        free = theta.detach().requires_grad_()
        return torch.autograd.grad(self.loss(free, batch), free)[0]


# Of all clients; class 0 has none of client 4's samples, and client 7 has one class only.
COUNTS = torch.tensor([[10, 3], [4, 4], [1, 9], [30, 31], [0, 8], [2, 1], [7, 7], [12, 0], [5, 6]])


def cohort(ids: list[int], seed: int = 0) -> Cohort:
    counts = COUNTS[ids]
    return dense_cohort(
        normal(N, P, seed=seed)[ids],
        normal(P, seed=7),
        num_samples=counts.sum(1).tolist(),
        class_counts=counts.tolist(),
        ids=ids,
        population=N,
        proxy=Hills(),
        test_class_counts=[2, 3],
    )


def start(weighting: Weighting) -> dict[str, Tensor]:
    return weighting.initial_state(COUNTS.sum(1))


def weigh(name: str, parameters: dict[str, object], ids: list[int]) -> Weights:
    weighting = WEIGHTS[name].build(**parameters)
    return weighting.weigh(cohort(ids), start(weighting))


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_table_covers_every_weighting() -> None:
    assert {case.name for case in CASES} == set(WEIGHTS)


@every_weighting
def test_weights_are_float64_not_negative_and_sum_to_one(name: str, parameters: dict[str, object]) -> None:
    for ids in ([0, 1, 2, 3, 4], list(range(N)), [4, 7]):
        values = weigh(name, parameters, ids).values
        assert (values.dtype, values.shape) == (torch.float64, (len(ids),))
        assert (values >= 0).all()
        assert float(values.sum()) == pytest.approx(1, abs=1e-14)


@every_weighting
def test_permuted_clients(name: str, parameters: dict[str, object]) -> None:
    ids, order = [0, 3, 4, 6, 8], [3, 1, 4, 0, 2]
    expected, permuted = weigh(name, parameters, ids), weigh(name, parameters, [ids[i] for i in order])
    close(permuted.values, expected.values[order])
    assert permuted.shrink == pytest.approx(expected.shrink, rel=1e-12)


@every_weighting
@pytest.mark.parametrize("client", [3, 7])
def test_one_client_has_all_the_weight(name: str, parameters: dict[str, object], client: int) -> None:
    assert weigh(name, parameters, [client]).values.tolist() == [1.0]


@every_weighting
def test_zero_updates_have_weights(name: str, parameters: dict[str, object]) -> None:
    weighting = WEIGHTS[name].build(**parameters)
    given = dense_cohort(
        torch.zeros(2, P),
        torch.zeros(P),
        num_samples=[2, 6],
        class_counts=[[1, 1], [2, 4]],
        proxy=Hills(),
        test_class_counts=[2, 3],
    )
    values = weighting.weigh(given, weighting.initial_state(torch.tensor([2, 6]))).values
    assert torch.isfinite(values).all()
    assert float(values.sum()) == pytest.approx(1, abs=1e-14)


@every_case
def test_only_what_says_so_shrinks(case: Case) -> None:
    assert (weigh(case.name, case.parameters, [0, 1, 2]).shrink != 1.0) == case.shrinks


@every_weighting
def test_only_who_says_so_needs_samples_of_the_servers_own(name: str, parameters: dict[str, object]) -> None:
    weighting = WEIGHTS[name].build(**parameters)
    bare = replace(cohort([0, 2, 5]), proxy=None)
    if "proxy" in WEIGHTS[name].needs:
        with pytest.raises(AssertionError, match=f"{name} needs samples of the server's own"):
            weighting.weigh(bare, start(weighting))
    else:
        values = weighting.weigh(bare, start(weighting)).values
        assert torch.equal(values, weigh(name, parameters, [0, 2, 5]).values)


@every_weighting
def test_a_state_that_was_kept_goes_on_alike(name: str, parameters: dict[str, object]) -> None:
    weighting = WEIGHTS[name].build(**parameters)
    state = start(weighting)
    assert all(value.dtype == torch.float64 for value in state.values())
    before = {key: (id(value), value.clone()) for key, value in state.items()}
    weighting.weigh(cohort([0, 2, 5]), state)
    assert all(id(value) == before[key][0] and not torch.equal(value, before[key][1]) for key, value in state.items())
    assert not any(value.requires_grad for value in state.values())
    kept = {key: value.clone() for key, value in state.items()}
    other = WEIGHTS[name].build(**parameters)
    after = weighting.weigh(cohort([0, 1, 5], seed=1), state)
    again = other.weigh(cohort([0, 1, 5], seed=1), kept)
    assert torch.equal(after.values, again.values)
    assert (after.shrink, after.diagnostics) == (again.shrink, again.diagnostics)
    assert all(torch.equal(state[key], kept[key]) for key in state)
    fresh = weighting.weigh(cohort([0, 1, 5], seed=1), start(weighting))
    assert torch.equal(after.values, fresh.values) == (not state)


@every_weighting
def test_works_without_gradients_being_recorded(name: str, parameters: dict[str, object]) -> None:
    weighting = WEIGHTS[name].build(**parameters)
    given = cohort([0, 2, 5])
    given = dense_cohort(
        given.updates.rows,
        given.theta,
        num_samples=given.clients.num_samples.tolist(),
        class_counts=given.clients.class_counts.tolist(),
        ids=[0, 2, 5],
        population=N,
        proxy=_Constant(),
        test_class_counts=[2, 3],
    )
    with torch.no_grad():
        quiet = weighting.weigh(given, start(weighting)).values
    assert torch.equal(quiet, weighting.weigh(given, start(weighting)).values)
    assert not quiet.requires_grad


class _Constant(Hills):
    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        return torch.linspace(-1, 2, P)


@every_case
def test_diagnostics_carry_the_name_as_prefix(case: Case) -> None:
    diagnostics = weigh(case.name, case.parameters, [0, 1, 2]).diagnostics
    assert all(key.startswith(f"{case.name}/") and isinstance(diagnostics[key], float) for key in diagnostics)
    assert bool(diagnostics) == case.diagnostics


def test_samples_and_uniform_by_hand() -> None:
    given = dense_cohort(torch.zeros(3, 2), num_samples=[1, 3, 4])
    assert WEIGHTS["samples"].build().weigh(given, {}).values.tolist() == [0.125, 0.375, 0.5]
    assert WEIGHTS["uniform"].build().weigh(given, {}).values.tolist() == [1 / 3] * 3
