"""The server's step, spread over ranks: against dense arithmetic, and bit for bit at 1, 2 and 3 ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.algorithms.controls import Scaffold
from fedspec_dist.clients.executors.base import ClientReport, Rows
from fedspec_dist.config import methods
from fedspec_dist.config.methods import AGGREGATORS, FILTERS, TRANSFORMS, WEIGHTS
from fedspec_dist.core.cohort import Clients
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.distributed.assignment import assign
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.rounds.divergence import NonFiniteModelError
from fedspec_dist.rounds.local import LocalResult, NonFiniteUpdateError, share_results
from fedspec_dist.rounds.server import FederatedServer
from fedspec_dist.rounds.server_memory import ServerMethods
from fedspec_dist.server.aggregators.fedgh import FedGH
from fedspec_dist.server.aggregators.means import FedAvg
from fedspec_dist.server.aggregators.robust import Median
from fedspec_dist.server.optimizers import Sgd
from fedspec_dist.server.transforms.privacy import Clip
from fedspec_dist.server.weights.shares import Samples
from tests.distributed.harness import run_ranks
from tests.reference import dense_cohort, fedgh_vectors, fipa_dense

RANK = 3
LR, DAMPING, STEP = 0.7, 0.25, 0.5
TARGET = 0.1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, bias=False) for _ in range(2))


class _Model(nn.Module):
    """Blocks for InCo, layers for FedLWS."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.fc = nn.Linear(192, 8)


LAYOUT = ParameterLayout(_Model())
# Five blocks of 1024, the last one padded: 2 and 3 ranks own different numbers of them.
NUM_PARAMETERS = len(LAYOUT)
assert NUM_PARAMETERS == 5000


def _made(table: dict[str, methods.Method]) -> dict[str, Any]:
    return {name: entry.build() for name, entry in table.items()}


class _Proxy:
    """Samples of the server's for which the loss is `|| theta - TARGET ||^2 / 2`, in two batches."""

    def batches(self, epoch: int) -> list[Tensor]:
        return [torch.tensor([epoch]), torch.tensor([epoch + 1])]

    def gradient(self, theta: Tensor, batch: Tensor) -> Tensor:
        return theta - TARGET


def _server_methods() -> dict[str, ServerMethods]:
    """Every server method of every family, the others being FedAvg's; with one setting more of some."""
    plain = ServerMethods(Samples(), FedAvg(), LocalAlgorithm(), None, Sgd(LR))
    aggregators = _made(methods.AGGREGATORS) | {
        "fedgh snapshot": FedGH(mode="snapshot"),
        "fipa": AGGREGATORS["fipa"].build(rank=RANK, damping=DAMPING, step=STEP),
        "fipa tsqr": AGGREGATORS["fipa"].build(rank=RANK, damping=DAMPING, step=STEP, merge="tsqr"),
    }
    weightings = _made(methods.WEIGHTS) | {"fedlaw": WEIGHTS["fedlaw"].build(epochs=2)}
    algorithms = _made(methods.LOCAL_ALGORITHMS) | {"scaffold full gradient": Scaffold(option=1)}
    return {
        **{f"aggregator {name}": replace(plain, aggregator=made) for name, made in aggregators.items()},
        **{f"weights {name}": replace(plain, weighting=made) for name, made in weightings.items()},
        **{f"optimizer {name}": replace(plain, optimizer=o) for name, o in _made(methods.SERVER_OPTIMIZERS).items()},
        **{f"algorithm {name}": replace(plain, algorithm=made) for name, made in algorithms.items()},
        "transform clip": replace(plain, transforms=[Clip(50.0)]),
        "transform fedgh": replace(plain, transforms=[TRANSFORMS["fedgh"].build()]),
        "transform noise": replace(plain, transforms=[Clip(50.0), TRANSFORMS["noise"].build()]),
        "transforms before the median": replace(
            plain, aggregator=Median(), transforms=[Clip(50.0), TRANSFORMS["fedgh"].build()]
        ),
        "filter": replace(plain, filter=FILTERS["rfft"].build(LAYOUT.segments, 0.1)),
        "random filter": replace(plain, filter=FILTERS["random"].build(LAYOUT.segments, 0.1)),
    }


@dataclass(frozen=True)
class Outcome:
    """After two rounds."""

    theta: Tensor
    broadcast: dict[str, Tensor]
    diagnostics: dict[str, float]


Results = dict[str, Outcome]


class _Client:
    """What a client brings in a round, made from its number."""

    def __init__(self, client: int, round_index: int, broken: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 * round_index + client)
        self.update = torch.randn(NUM_PARAMETERS, generator=generator)
        if broken:
            self.update[client] = float("nan")
        num_columns = client % (RANK + 1)  # some bring no eigenvectors
        basis = torch.randn(NUM_PARAMETERS, num_columns, generator=generator, dtype=torch.float64)
        self.basis = torch.linalg.qr(basis).Q.float()
        self.eigenvalues = torch.rand(num_columns, generator=generator, dtype=torch.float64) + 0.1
        self.num_samples = 10 + 7 * client
        self.class_counts = [10, 7 * client]
        self.uploads = {
            "fisher_diagonal": torch.rand(NUM_PARAMETERS, generator=generator),
            "increment": torch.randn(NUM_PARAMETERS, generator=generator),
        }


def _local_result(clients: list[_Client], columns: Columns, uploads: tuple[str, ...] = ()) -> LocalResult:
    tables = {name: torch.zeros(len(clients), columns.padded) for name in uploads}
    rows, reports = Rows(torch.zeros(len(clients), columns.padded), tables), []
    for place, client in enumerate(clients):
        rows.updates[place, :NUM_PARAMETERS] = client.update
        for name, table in tables.items():
            table[place, :NUM_PARAMETERS] = client.uploads[name]
        numbers = torch.tensor([1.0, 0.5, float(client.update.abs().max())], dtype=torch.float64)
        reports.append(ClientReport(numbers))
        rows.sketches.append((client.eigenvalues, client.basis.T))
    return LocalResult(rows, reports, {})


def _facts(clients: list[_Client], cohort: list[int]) -> Clients:
    steps = [2 + client for client in cohort]
    return Clients(
        ids=torch.tensor(cohort),
        num_samples=torch.tensor([client.num_samples for client in clients]),
        class_counts=torch.tensor([client.class_counts for client in clients]),
        num_steps=torch.tensor(steps),
        effective_steps=torch.tensor(steps, dtype=torch.float64),
        lr=0.1,
        population=NUM_CLIENTS,
    )


NUM_CLIENTS = 8


def _server(made: ServerMethods, columns: Columns, collectives: Collectives) -> FederatedServer:
    samples = [_Client(client, 0).num_samples for client in range(NUM_CLIENTS)]
    return FederatedServer(
        made, LAYOUT, columns, collectives, torch.device("cpu"), samples, seed=3, proxy=lambda *_: _Proxy()
    )


def _needs(made: ServerMethods) -> frozenset[str]:
    """Of the aggregator, from its line."""
    return next(row.needs for row in methods.AGGREGATORS.values() if row.load() is type(made.aggregator))


def _round(
    server: FederatedServer,
    made: ServerMethods,
    theta: Tensor,
    index: int,
    collectives: Collectives,
    cohort: list[int],
    broken: list[int],
) -> tuple[Tensor, dict[str, float]]:
    clients = [_Client(client, index, client in broken) for client in cohort]
    facts = _facts(clients, cohort)
    plan = assign(facts.num_samples.tolist(), collectives.num_ranks)
    mine = plan[collectives.rank]
    uploads = (*made.algorithm.uploads, *(_needs(made) & {"fisher_diagonal"}))
    local = _local_result([clients[p] for p in mine], server.columns, uploads)
    report = share_results(local, cohort, facts, plan, RANK, collectives)
    kept = report.finite("skip", 1)
    rows = local.of([place for place, p in enumerate(mine) if p in kept], "sketches" in _needs(made))
    return server.step(theta, server.exchange(rows, report.facts(kept), theta), index)


def _two_rounds(collectives: Collectives, cohort: list[int], broken: list[int], gathered: bool) -> Results:
    found: Results = {}
    for name, made in _server_methods().items():
        cut = Columns.gathered if gathered else Columns.shared
        server = _server(made, cut(NUM_PARAMETERS, collectives.num_ranks, RANK * len(cohort)), collectives)
        theta, diagnostics = torch.linspace(-1, 1, NUM_PARAMETERS), {}
        for index in range(2):
            theta, diagnostics = _round(server, made, theta, index, collectives, cohort, broken)
        found[name] = Outcome(theta, server.memory.broadcast, diagnostics)
    return found


def _dense(name: str, cohort: list[int]) -> Tensor:
    theta = torch.linspace(-1, 1, NUM_PARAMETERS).double()
    for index in range(2):
        clients = [_Client(client, index) for client in cohort]
        weights = torch.tensor([float(client.num_samples) for client in clients]).double()
        weights /= weights.sum()
        updates = torch.stack([client.update for client in clients]).double()
        if "fipa" in name:
            # Only directions that some sketch spans move, so the dense P x P problem may be posed inside their span.
            q = torch.linalg.qr(torch.cat([client.basis.double() for client in clients], dim=1)).Q
            bases = [q.T @ client.basis.double() for client in clients]
            spectra = [client.eigenvalues for client in clients]
            merged = q @ fipa_dense(bases, spectra, updates @ q, weights, DAMPING)
            direction = STEP * DAMPING * merged
        elif "fedgh" in name:
            direction = weights @ fedgh_vectors(updates, "snapshot" if "snapshot" in name else "pairwise")
        else:
            direction = weights @ updates
        theta += LR * direction
    return theta


def _moves_otherwise(made: ServerMethods) -> bool:
    """Than FedAvg: a method of the server's own, or a local one whose server changes the direction."""

    def described(methods_: ServerMethods) -> list[Any]:
        parts = (methods_.weighting, methods_.aggregator, methods_.filter, methods_.optimizer, *methods_.transforms)
        return [(type(part), getattr(part, "__dict__", None)) for part in parts]

    if described(made) != described(_server_methods()["aggregator fedavg"]):
        return True
    cohort = dense_cohort(torch.ones(1, 2), uploads={name: torch.ones(1, 2) for name in made.algorithm.uploads})
    direction = torch.ones(2, dtype=torch.float64)
    state = {name: torch.ones(2) for name in made.algorithm.server}
    return not torch.equal(made.algorithm.server_step(cohort, direction, state), direction)


@pytest.fixture(scope="module")
def one_rank() -> Results:
    return _two_rounds(SingleProcess(), [0, 1, 2, 3, 6], [], False)


@pytest.mark.parametrize("name", ["fedavg", "fedgh", "fedgh snapshot", "fipa", "fipa tsqr"])
def test_a_step_equals_dense_arithmetic(name: str, one_rank: Results) -> None:
    found = one_rank[f"aggregator {name}"].theta.double()
    torch.testing.assert_close(found, _dense(name, [0, 1, 2, 3, 6]), rtol=1e-5, atol=1e-6)


def test_every_method_of_the_server_moves_the_model_in_its_own_way(one_rank: Results) -> None:
    plain = one_rank["aggregator fedavg"].theta
    for name, made in _server_methods().items():
        outcome = one_rank[name]
        assert torch.equal(outcome.theta, plain) == (not _moves_otherwise(made)), name
        assert outcome.broadcast.keys() == set(made.algorithm.broadcast), name
        assert all(vector.any() for vector in outcome.broadcast.values()), name


# Cohort and the clients in it whose updates are broken: full; fewer clients than three ranks; a rank whose only client
# is dropped.
CASES: list[tuple[list[int], list[int]]] = [([0, 1, 2, 3, 6], []), ([5], []), ([3, 5], []), ([1, 2, 5], [2])]


def _all_cases(collectives: Collectives, gathered: bool) -> list[Results]:
    return [_two_rounds(collectives, cohort, broken, gathered) for cohort, broken in CASES]


def _both_cuts(collectives: Collectives) -> dict[bool, list[Results]]:
    return {gathered: _all_cases(collectives, gathered) for gathered in (False, True)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_same_bits_on_any_number_of_ranks_sharded_and_gathered(num_ranks: int, tmp_path: Path) -> None:
    alone = _all_cases(SingleProcess(), False)
    for rank, both in enumerate(run_ranks(_both_cuts, num_ranks, tmp_path)):
        for gathered, found in both.items():
            for case, results, expected in zip(CASES, found, alone, strict=True):
                for name, outcome in expected.items():
                    where = f"{name} on rank {rank}, gathered {gathered}, cohort {case}"
                    assert torch.equal(results[name].theta, outcome.theta), where
                    for vector, whole in outcome.broadcast.items():
                        assert torch.equal(results[name].broadcast[vector], whole), where
                    assert results[name].diagnostics == ({} if gathered and rank else outcome.diagnostics), where


def test_a_skipped_client_counts_as_if_it_had_not_been_there() -> None:
    with_broken = _two_rounds(SingleProcess(), [1, 2, 5], [2], False)
    without = _two_rounds(SingleProcess(), [1, 5], [], False)
    for name, outcome in without.items():
        if "fipa" not in name:  # there the block width also depends on the cohort's size
            assert torch.equal(with_broken[name].theta, outcome.theta), name
        torch.testing.assert_close(with_broken[name].theta, outcome.theta, rtol=1e-5, atol=1e-6, msg=name)


def test_the_filter_on_the_update_takes_out_its_low_frequencies(one_rank: Results) -> None:
    start = torch.linspace(-1, 1, NUM_PARAMETERS)
    moved = (one_rank["filter"].theta - start).double()
    filtered = moved.clone()
    FILTERS["rfft"].build(LAYOUT.segments, 0.1)(filtered)
    torch.testing.assert_close(filtered, moved, rtol=0, atol=1e-6)
    plain = one_rank["aggregator fedavg"].theta - start
    assert moved.norm() < 0.97 * plain.norm()


def _third_round(collectives: Collectives, theta: dict[str, Tensor], states: dict[str, Any]) -> dict[str, Any]:
    """The round after two others, by a new server that goes on from `states`; the model and the states after it."""
    found = {}
    for name, made in _server_methods().items():
        columns = Columns.shared(NUM_PARAMETERS, collectives.num_ranks, RANK * 3)
        server = _server(made, columns, collectives)
        server.memory.load(states[name])
        moved, _ = _round(server, made, theta[name], 2, collectives, [1, 2, 5], [])
        found[name] = (moved, server.memory.full(), dict(server.memory.broadcast))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_the_server_remembers_goes_on_at_another_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    alone = SingleProcess()
    thetas, states, expected = {}, {}, {}
    for name, made in _server_methods().items():
        server = _server(made, Columns.shared(NUM_PARAMETERS, 1, RANK * 3), alone)
        theta = torch.linspace(-1, 1, NUM_PARAMETERS)
        for index in range(2):
            theta, _ = _round(server, made, theta, index, alone, [1, 2, 5], [])
        thetas[name], states[name] = theta, {key: value.clone() for key, value in server.memory.full().items()}
        moved, _ = _round(server, made, theta, 2, alone, [1, 2, 5], [])
        expected[name] = (moved, server.memory.full(), dict(server.memory.broadcast))
    families = ("aggregator", "algorithm", "optimizer", "weights")
    assert {name.split()[0] for name, state in states.items() if state} == set(families), "something of each is tested"
    for found in run_ranks(_third_round, num_ranks, tmp_path, thetas, states):
        for name, (theta, state, broadcast) in expected.items():
            assert torch.equal(found[name][0], theta), name
            for whole, mine in ((state, found[name][1]), (broadcast, found[name][2])):
                assert whole.keys() == mine.keys()
                assert all(torch.equal(mine[key], value) for key, value in whole.items()), name


def _raised_and_kept(collectives: Collectives) -> tuple[str, list[int]]:
    cohort = [4, 7, 9]
    plan = assign([1, 1, 1], collectives.num_ranks)
    clients = [_Client(client, 0, client in (7, 9)) for client in cohort]
    columns = Columns.shared(NUM_PARAMETERS, collectives.num_ranks)
    local = _local_result([clients[p] for p in plan[collectives.rank]], columns)
    report = share_results(local, cohort, _facts(clients, cohort), plan, RANK, collectives)
    with pytest.raises(NonFiniteUpdateError) as raised:
        report.finite("raise", 12)
    kept = report.finite("skip", 12)
    assert report.metrics(kept)["clients_skipped"] == 2
    assert report.metrics(kept)["train_loss"] == 1.0
    return str(raised.value), kept


def test_non_finite_updates_name_client_round_and_rank_on_every_rank(tmp_path: Path) -> None:
    for message, kept in run_ranks(_raised_and_kept, 2, tmp_path):
        assert message.startswith("client 7 returned a non-finite update in round 12 (rank 1; 1 more clients did).")
        assert "runtime.on_nonfinite=skip" in message
        assert kept == [0]


def test_nobody_left_has_no_mean() -> None:
    clients = [_Client(1, 0, broken=True)]
    local = _local_result(clients, Columns.shared(NUM_PARAMETERS, 1))
    report = share_results(local, [1], _facts(clients, [1]), [[0]], RANK, SingleProcess())
    assert report.finite("skip", 1) == []
    assert report.metrics([]) == {"train_loss": None, "filter/energy_removed": None, "clients_skipped": 1}


def _stopped_report(collectives: Collectives) -> bool:
    clients = [_Client(1, 0), _Client(2, 0)]
    local = _local_result(clients[:1] if collectives.rank == 0 else [], Columns.shared(NUM_PARAMETERS, 2))
    local = replace(local, complete=collectives.rank == 0)
    return share_results(local, [1, 2], _facts(clients, [1, 2]), [[0], [1]], RANK, collectives).stopped


def test_one_rank_that_stopped_half_way_stops_the_round_for_all(tmp_path: Path) -> None:
    assert run_ranks(_stopped_report, 2, tmp_path) == [True, True]


def _exploding(collectives: Collectives) -> str:
    made = replace(_server_methods()["optimizer sgd"], optimizer=Sgd(1e39))
    server = _server(made, Columns.shared(NUM_PARAMETERS, collectives.num_ranks), collectives)
    with pytest.raises(NonFiniteModelError) as raised:
        _round(server, made, torch.zeros(NUM_PARAMETERS), 4, collectives, [1, 2, 5], [])
    return str(raised.value)


def test_a_step_of_the_server_that_is_not_finite_is_its_own_fault(tmp_path: Path) -> None:
    for message in run_ranks(_exploding, 2, tmp_path):
        assert message.startswith("the server's step of round 5 is not finite, though what the clients sent is: lower")


def test_a_memory_of_another_version_of_a_method_is_refused() -> None:
    made = _server_methods()["algorithm scaffold"]
    server = _server(made, Columns.shared(NUM_PARAMETERS, 1), SingleProcess())
    with pytest.raises(ValueError, match=r"what another version of these methods remembers .* start over with --fresh"):
        server.memory.load({"algorithm.c": torch.zeros(NUM_PARAMETERS)})
