"""The server's step, spread over ranks: against dense arithmetic, and bit for bit at 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedspec_dist import methods
from fedspec_dist.distributed.assignment import assign
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.rounds.local import LocalResult, NonFiniteUpdateError, share_results
from fedspec_dist.rounds.server import FederatedServer
from fedspec_dist.server.cohort import Aggregator
from fedspec_dist.server.fedavg import FedAvg
from fedspec_dist.server.fedgh import FedGH
from fedspec_dist.server.fipa import Fipa
from fedspec_dist.server.optimizers import Sgd
from fedspec_dist.server.weights import samples
from tests.distributed.harness import run_ranks
from tests.reference import fedgh_vectors, fipa_dense

# Five blocks of 1024, the last one padded: 2 and 3 ranks own different numbers of them.
NUM_PARAMETERS = 5000
RANK = 3
LR, DAMPING, STEP = 0.7, 0.25, 0.5
AGGREGATORS: dict[str, Aggregator] = {
    "fedavg": FedAvg(),
    "fedgh": FedGH(),
    "fedgh snapshot": FedGH(mode="snapshot"),
    "fipa gram": Fipa(rank=RANK, damping=DAMPING, step=STEP),
    "fipa tsqr": Fipa(rank=RANK, damping=DAMPING, step=STEP, merge="tsqr"),
}


def test_every_aggregator_is_in_this_table() -> None:
    assert {name.split()[0] for name in AGGREGATORS} == set(methods.AGGREGATORS)


Results = dict[str, tuple[Tensor, dict[str, float]]]


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


def _local_result(clients: list[_Client], columns: Columns) -> LocalResult:
    result = LocalResult(torch.zeros(len(clients), columns.padded))
    for row, client in zip(result.updates, clients, strict=True):
        row[:NUM_PARAMETERS] = client.update
        result.scalars.append(torch.tensor([1.0, 0.5, float(client.update.abs().max())], dtype=torch.float64))
        result.sketches.append((client.eigenvalues, client.basis.T))
    return result


def _two_rounds(collectives: Collectives, cohort: list[int], broken: list[int], gathered: bool) -> Results:
    found: Results = {}
    for name, aggregator in AGGREGATORS.items():
        cut = Columns.gathered if gathered else Columns.shared
        columns = cut(NUM_PARAMETERS, collectives.num_ranks, RANK * len(cohort))
        server = FederatedServer(aggregator, samples, Sgd(LR), columns, collectives, torch.device("cpu"))
        theta = torch.linspace(-1, 1, NUM_PARAMETERS)
        diagnostics: dict[str, float] = {}
        for index in range(2):
            clients = [_Client(client, index, client in broken) for client in cohort]
            counts = [client.num_samples for client in clients]
            plan = assign(counts, collectives.num_ranks)
            mine = plan[collectives.rank]
            local = _local_result([clients[p] for p in mine], columns)
            report = share_results(local, cohort, counts, plan, RANK, collectives)
            kept = report.finite("skip", 1)
            rows = local.rows([place for place, p in enumerate(mine) if p in kept], aggregator.needs_sketches)
            theta, diagnostics = server.step(theta, server.exchange(rows, report.facts(kept)))
        found[name] = (theta, diagnostics)
    return found


def _dense(name: str, cohort: list[int]) -> Tensor:
    theta = torch.linspace(-1, 1, NUM_PARAMETERS).double()
    for index in range(2):
        clients = [_Client(client, index) for client in cohort]
        weights = torch.tensor([float(client.num_samples) for client in clients]).double()
        weights /= weights.sum()
        updates = torch.stack([client.update for client in clients]).double()
        if name.startswith("fipa"):
            # Only directions that some sketch spans move, so the dense P x P problem may be posed inside their span.
            q = torch.linalg.qr(torch.cat([client.basis.double() for client in clients], dim=1)).Q
            bases = [q.T @ client.basis.double() for client in clients]
            spectra = [client.eigenvalues for client in clients]
            merged = q @ fipa_dense(bases, spectra, updates @ q, weights, DAMPING)
            direction = STEP * DAMPING * merged
        elif name.startswith("fedgh"):
            direction = weights @ fedgh_vectors(updates, "snapshot" if "snapshot" in name else "pairwise")
        else:
            direction = weights @ updates
        theta += LR * direction
    return theta


@pytest.fixture(scope="module")
def one_rank() -> Results:
    return _two_rounds(SingleProcess(), [0, 1, 2, 3, 6], [], False)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_step_equals_dense_arithmetic(name: str, one_rank: Results) -> None:
    torch.testing.assert_close(one_rank[name][0].double(), _dense(name, [0, 1, 2, 3, 6]), rtol=1e-5, atol=1e-6)


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
                for name, (theta, diagnostics) in expected.items():
                    where = f"{name} on rank {rank}, gathered {gathered}, cohort {case}"
                    assert torch.equal(results[name][0], theta), where
                    assert results[name][1] == ({} if gathered and rank else diagnostics), where


def test_a_skipped_client_counts_as_if_it_had_not_been_there() -> None:
    with_broken = _two_rounds(SingleProcess(), [1, 2, 5], [2], False)
    without = _two_rounds(SingleProcess(), [1, 5], [], False)
    for name, (theta, _) in without.items():
        if not name.startswith("fipa"):  # there the block width also depends on the cohort's size
            assert torch.equal(with_broken[name][0], theta), name
        torch.testing.assert_close(with_broken[name][0], theta, rtol=1e-5, atol=1e-6, msg=name)


class _Momentum(Sgd):
    """A server optimizer with memory, to see its state through a checkpoint."""

    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        return {"momentum": torch.zeros(num_columns)}

    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["momentum"].mul_(0.9).add_(direction)
        return theta + self.lr * state["momentum"]


def _momentum_server(collectives: Collectives) -> FederatedServer:
    columns = Columns.shared(NUM_PARAMETERS, collectives.num_ranks)
    return FederatedServer(FedAvg(), samples, _Momentum(LR), columns, collectives, torch.device("cpu"))


def _one_step(collectives: Collectives, theta: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    server = _momentum_server(collectives)
    if state:
        server.load_state(state)
    clients = [_Client(client, 0) for client in (1, 2)]
    plan = assign([1, 1], collectives.num_ranks)
    local = _local_result([clients[p] for p in plan[collectives.rank]], server.columns)
    report = share_results(local, [1, 2], [17, 24], plan, RANK, collectives)
    rows = local.rows(range(len(plan[collectives.rank])), False)
    theta, _ = server.step(theta, server.exchange(rows, report.facts([0, 1])))
    return theta, server.full_state()


def test_the_servers_state_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    theta, state = _one_step(SingleProcess(), torch.zeros(NUM_PARAMETERS), {})
    assert state["momentum"].shape == (NUM_PARAMETERS,)
    expected = _one_step(SingleProcess(), theta, state)
    for found, found_state in run_ranks(_one_step, 3, tmp_path, theta, state):
        assert torch.equal(found, expected[0])
        assert torch.equal(found_state["momentum"], expected[1]["momentum"])


def _raised_and_kept(collectives: Collectives) -> tuple[str, list[int]]:
    cohort = [4, 7, 9]
    plan = assign([1, 1, 1], collectives.num_ranks)
    clients = [_Client(client, 0, client in (7, 9)) for client in cohort]
    columns = Columns.shared(NUM_PARAMETERS, collectives.num_ranks)
    local = _local_result([clients[p] for p in plan[collectives.rank]], columns)
    report = share_results(local, cohort, [1, 1, 1], plan, RANK, collectives)
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
    plan = [[0]]
    local = _local_result([_Client(1, 0, broken=True)], Columns.shared(NUM_PARAMETERS, 1))
    report = share_results(local, [1], [1], plan, RANK, SingleProcess())
    assert report.finite("skip", 1) == []
    assert report.metrics([]) == {"train_loss": None, "filter/energy_removed": None, "clients_skipped": 1}


def _stopped_report(collectives: Collectives) -> bool:
    local = _local_result([_Client(1, 0)] if collectives.rank == 0 else [], Columns.shared(NUM_PARAMETERS, 2))
    local.complete = collectives.rank == 0
    return share_results(local, [1, 2], [1, 1], [[0], [1]], RANK, collectives).stopped


def test_one_rank_that_stopped_half_way_stops_the_round_for_all(tmp_path: Path) -> None:
    assert run_ranks(_stopped_report, 2, tmp_path) == [True, True]
