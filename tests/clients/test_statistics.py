"""Statistics of clients: each against its dense twin, in eval mode, with draws of its own; what cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedspec_dist.clients.executors.base import ClientWork, Rows, Sent
from fedspec_dist.clients.statistics.base import Collector, Material, Statistic
from fedspec_dist.clients.vectors import widths
from fedspec_dist.config import methods
from fedspec_dist.config.methods import STATISTICS
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.dataset import Examples
from fedspec_dist.models.network import Network
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.tasks.classification import Classification
from tests.reference import dense_fisher, softmax_curvature
from tests.rounds.jobs import tiny

C, D = 3, 4
SAMPLES = torch.tensor([7, 0, 3, 4, 9])
PADDED = 64


class Net(Network):
    """Dropout would show in everything, were it not for eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, D)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(D, C)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:
        return self.dropout(torch.tanh(self.first(images)))


class Problem:
    """A client whose shared parameters are all but the first layer's bias, which is its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = Net().double()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        self.y = torch.tensor([0, 1, 0, 0, 2, 1, 2, 0, 1, 0, 1, 2])  # the client has 0, 0, 0, 2, 0: none of 1
        self.layout = ParameterLayout(self.module, shared=["first.weight", "fc.*"])
        self.shared = self.layout.shared
        whole = self.layout.flatten(self.module)
        self.theta = whole[: len(self.shared)] + 0.1
        self.update = 0.1 * torch.randn(len(self.shared), generator=generator, dtype=torch.float64)
        self.sent = Sent(torch.cat([self.theta, whole[len(self.shared) :]]), 0.1, 4, 11)
        self.material = Material(
            self.module, self.shared, Classification(), Examples((self.x,), self.y, groups=self.y), C, batch_size=2
        )

    def work(self, client: int = 3) -> ClientWork:
        return ClientWork(client, SAMPLES, SAMPLES, [], None, torch.tensor([4, 0, 1]), 0)

    def network(self, theta: Tensor) -> Network:
        """A copy, in eval mode, at the shared parameters."""
        other = Net().double().eval()
        other.load_state_dict(self.module.state_dict())
        with torch.no_grad():
            for name, values in self.shared.views(theta).items():
                dict(other.named_parameters())[name].copy_(values)
        return other

    def forward(self, theta: Tensor, inputs: Tensor) -> Tensor:
        shaped = {s.name: theta[s.start : s.stop].view(s.shape) for s in self.shared.segments}
        return functional_call(self.network(self.theta), shaped, (inputs,))

    def fisher(self, theta: Tensor) -> Tensor:
        return dense_fisher(self.forward, theta, self.x[SAMPLES], softmax_curvature)

    def collect(self, made: dict[str, Statistic], client: int = 3, num_clients: int = 1) -> tuple[Rows, list[Tensor]]:
        uploads, short = {}, {}
        for name, statistic in made.items():
            if statistic.width is None:
                uploads[name] = torch.zeros(num_clients, PADDED, dtype=torch.float64)
            else:
                short[name] = torch.zeros(num_clients, statistic.width, dtype=torch.float64)
        updates = torch.zeros(num_clients, PADDED, dtype=torch.float64)
        updates[:, : len(self.update)] = self.update
        rows = Rows(updates, uploads, short)
        collector, largest = Collector(made, self.module, len(self.shared)), []
        for place in range(num_clients):
            largest += collector.before(self.work(client + place), self.sent, rows, place)
            largest += collector.after(self.work(client + place), self.sent, rows, place)
        return rows, largest


def dense_gradient(problem: Problem) -> Tensor:
    network = problem.network(problem.theta)
    cross_entropy(network(problem.x[SAMPLES]), problem.y[SAMPLES]).backward()
    parameters = dict(network.named_parameters())
    return torch.cat([parameters[s.name].grad.reshape(-1) for s in problem.shared.segments])


def dense_features(problem: Problem) -> Tensor:
    network = problem.network(problem.theta)
    with torch.no_grad():
        return sum(network.represent(problem.x[n : n + 1])[0] for n in SAMPLES.tolist()) / len(SAMPLES)


def dense_class_features(problem: Problem) -> Tensor:
    network, means = problem.network(problem.theta), torch.zeros(C, D, dtype=torch.float64)
    for label in range(C):
        own = [n for n in SAMPLES.tolist() if problem.y[n] == label]
        for n in own:
            means[label] += network.represent(problem.x[n : n + 1])[0].detach() / len(own)
    return means.flatten()


# Name -> its parameters, and what it finds.
TABLE: dict[str, tuple[dict[str, Any], Callable[[Problem], Tensor]]] = {
    "sketches": (
        {"rank": 60, "oversampling": 0, "power_iterations": 3},
        lambda problem: problem.fisher(problem.theta),
    ),
    "fisher_diagonal": ({}, lambda problem: problem.fisher(problem.theta + problem.update).diagonal()),
    "gradient": ({}, dense_gradient),
    "mean_features": ({}, dense_features),
    "class_features": ({}, dense_class_features),
}
every_statistic = pytest.mark.parametrize("name", TABLE)


def build(name: str, problem: Problem) -> dict[str, Statistic]:
    return {name: STATISTICS[name].build(problem.material, **TABLE[name][0])}


def test_the_table_covers_every_statistic() -> None:
    assert TABLE.keys() == STATISTICS.keys()


@every_statistic
def test_a_statistic_is_its_dense_twin(name: str) -> None:
    problem = Problem()
    problem.module.train()
    made, expected = build(name, problem), TABLE[name][1](problem)
    rows, largest = problem.collect(made)
    if made[name].is_matrix:
        ((eigenvalues, vectors),) = rows.sketches
        assert vectors.shape == (len(eigenvalues), len(problem.shared))
        found = vectors.T @ torch.diag(eigenvalues) @ vectors
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    else:
        room = rows.uploads[name][0] if made[name].width is None else rows.short[name][0]
        torch.testing.assert_close(room[: len(expected)], expected, rtol=1e-10, atol=1e-12)
        assert not room[len(expected) :].any(), "padding stays zero"
        assert float(largest[0]) == pytest.approx(float(expected.abs().max()))
    assert all(part.training for part in problem.module.modules()), "the model goes on training"


@every_statistic
def test_batches_do_not_decide_and_a_number_that_is_none_is_told(name: str) -> None:
    problem = Problem()
    problem.material = replace(problem.material, batch_size=100)
    expected = TABLE[name][1](problem)
    rows, _ = problem.collect(build(name, problem))
    if rows.short:
        torch.testing.assert_close(rows.short[name][0], expected, rtol=1e-12, atol=1e-12)
    problem.theta[0] = problem.sent.theta[0] = torch.nan
    _, largest = problem.collect(build(name, problem))
    assert not torch.stack(largest).isfinite().all()


class Random(Statistic):
    width: ClassVar[int] = 2

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Any:
        return torch.tensor([float(torch.rand(())), np.random.rand()], dtype=theta.dtype)


def test_draws_are_of_the_client_and_leave_the_training_alone() -> None:
    problem = Problem()
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    rows, _ = problem.collect({"one": Random(problem.material), "two": Random(problem.material)}, 3, num_clients=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    drawn = torch.cat([rows.short["one"], rows.short["two"]])
    assert len(drawn.flatten().unique()) == 8
    again, _ = problem.collect({"two": Random(problem.material)}, client=4)
    assert torch.equal(again.short["two"][0], rows.short["two"][1]), "whoever was there before, and whatever else"
    problem.sent = replace(problem.sent, round_index=5)
    other, _ = problem.collect({"two": Random(problem.material)}, client=4)
    assert not torch.equal(other.short["two"], again.short["two"])


def test_a_result_of_another_shape_is_refused() -> None:
    class Long(Random):
        def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Any:
            return theta

    class Tuple(Random):
        def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Any:
            return 1, 2

    problem = Problem()
    with pytest.raises(ValueError, match=r"statistics: mine gave a tensor of shape \[35\]; allowed is .* \[2\]"):
        problem.collect({"mine": Long(problem.material)})
    with pytest.raises(ValueError, match="statistics: mine gave a tuple"):
        problem.collect({"mine": Tuple(problem.material)})


def test_widths_of_uploads() -> None:
    assert widths(("a", "b")) == {"a": None, "b": None}
    assert widths({"a": 3, "b": None}) == {"a": 3, "b": None}


# ------------------------------------------------------------------------------------------ what cannot be had


class Asks:
    needs: ClassVar[frozenset[str]] = frozenset({"mean_features"})
    needs_proxy = False

    def __init__(self, rank: int = 1) -> None:
        pass

    def initial_state(self, num_samples: Tensor) -> dict[str, Tensor]:
        return {}

    def weigh(self, cohort: Any, state: dict[str, Tensor]) -> Any:
        raise AssertionError("never asked")


class AsksClasses(Asks):
    needs: ClassVar[frozenset[str]] = frozenset({"class_features"})


class AsksNobody(Asks):
    needs: ClassVar[frozenset[str]] = frozenset({"hessian"})


class AsksSketches(Asks):
    needs: ClassVar[frozenset[str]] = frozenset({"sketches"})


class Plain(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


class Uploads:
    own = server = broadcast = frozen_at = ()
    needs_features = needs_levels = needs_full_gradient = proximal = False
    passes = 1.0

    def __init__(self, width: Any = 3) -> None:
        self.uploads = {"mean_features": width}

    def bind(self, segments: Any) -> None:
        pass

    begin = correct = end = bind


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = {"rank": (int, 1)}
    named = [
        *(("server.weights", name, ask) for name in ("Asks", "AsksClasses", "AsksNobody", "AsksSketches")),
        ("model", "Plain", {}),
        ("local.algorithm", "Uploads", {"width": (Any, 3)}),
    ]
    for key, name, parameters in named:
        table = methods.FAMILIES[key].table
        monkeypatch.setitem(table, name, None)
        del table[name]
        methods.register(key, name, f"{__name__}:{name}", **parameters)


FIPA = "server.aggregator={type: fipa, rank: 3}"
REFUSED = [
    (["server.weights=AsksNobody"], r"^server\.weights: AsksNobody needs 'hessian'; allowed: sketches, fisher_diag"),
    (["server.weights=AsksSketches"], r"needs sketches, so it must have the parameters rank, oversampling, power"),
    (["server.weights=Asks", "model=Plain"], r"^server\.weights: Asks needs mean_features, but model\.type Plain has"),
    (["local.algorithm={type: Uploads, width: 0}"], r"^local\.algorithm: Uploads gives .* width 0; allowed is a whole"),
    (["local.algorithm={type: Uploads, width: wide}"], r"the width 'wide'; allowed is a whole number"),
    (["server.weights=Asks", "local.algorithm=Uploads"], r"uploads 'mean_features', which is also the statistic that"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be_had_is_refused_before_the_first_round(overrides: list[str], message: str, plugin: None) -> None:
    config = tiny(overrides)
    federation = load_federation(config, prepares=True)
    with pytest.raises(ValueError, match=message):
        check_patterns(config, build_model(config, federation.dataset), federation.dataset)


def test_classes_are_those_of_the_data_set(plugin: None, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,y\n" + "".join(f"{n},{n * n % 7},{n / 3:.3f}\n" for n in range(40)))
    config = tiny(
        [
            f"data={{dataset: csv, root: {tmp_path}, path: x.csv, target: y}}",
            *("data.partition={type: iid, clients: 6}", "model={type: mlp, hidden: [3]}", "task=regression"),
            "server.weights=AsksClasses",
        ]
    )
    federation = load_federation(config, prepares=True)
    with pytest.raises(ValueError, match="AsksClasses needs class_features, which takes a class for each sample"):
        check_patterns(config, build_model(config, federation.dataset), federation.dataset)


def test_a_family_of_its_own_for_plugins() -> None:
    with pytest.raises(ValueError, match=r"no family 'statistic'; there are: .*statistics"):
        methods.register("statistic", "mine", "x:Y")
