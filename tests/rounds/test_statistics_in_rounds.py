"""Statistics, short vectors and draws of server methods in whole runs: the same bits at any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedspec_dist.config.methods import FAMILIES, STATISTICS
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.memory import Work
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.rounds.plan import extras_of, plan_round, traffic
from tests.distributed.harness import run_ranks
from tests.reference import dense_cohort
from tests.rounds.jobs import Finished, run_job, tiny

PLUGIN = "plugins=[tests.rounds.asking_methods]"
ASKING = [
    PLUGIN,
    *("server.weights=alike", "server.aggregator=drawing", "server.transforms=[shaking, fedgh]"),
    *("local.algorithm=reporting", "checkpoint.every=1"),
]
SETTINGS = {
    "all": ASKING,
    "with sketches": [PLUGIN, "server.weights=alike", "server.aggregator={type: fipa, rank: 3}"],
    "of what is shared": [
        *(PLUGIN, "server.weights=alike", "server.aggregator={type: fipa, rank: 3}"),
        *("server.shared=[conv*, norm*]", "local.keep=[fc.*]"),
    ],
    "fewer clients than ranks": [*ASKING, "clients_per_round=2"],
    "gathered": [*ASKING, "runtime.aggregation=gather"],
    "skipped": [*ASKING, "runtime.on_nonfinite=skip", "clients_per_round=6"],
    "batched": [*ASKING, "runtime.executor=batched", "runtime.clients_per_batch=2"],
    "float64": [*ASKING, "runtime.dtype=float64"],
}
SPOILED = 11  # a training image, whose client then has nothing finite to send


def _runs(
    collectives: Collectives, folder: str, names: list[str] | None = None, until: int | None = None
) -> dict[str, Finished]:
    return {
        name: run_job(
            tiny(SETTINGS[name]),
            Path(folder) / name,
            collectives,
            until,
            spoil={SPOILED: float("inf")} if name == "skipped" else None,
        )
        for name in names or SETTINGS
    }


@pytest.fixture(autouse=True)
def _plugin_is_gone_afterwards() -> Iterator[None]:
    """From this process: other tests walk through all methods that there are."""
    yield
    sys.modules.pop("tests.rounds.asking_methods", None)
    for table in (*(family.table for family in FAMILIES.values()), STATISTICS):
        for name in ("alike", "drawing", "shaking", "reporting", "wide", "probe"):
            table.pop(name, None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("alone")
    (runs,) = run_ranks(_runs, 1, folder, str(folder))
    return dict(runs)


def _require_same(ranks: list[dict[str, Finished]], expected: dict[str, Finished], since: int = 0) -> None:
    for name in ranks[0]:
        for found in ranks:
            assert all(torch.equal(found[name].model[key], t) for key, t in expected[name].model.items()), name
        assert ranks[0][name].results() == expected[name].results()[since:], name


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["all", "with sketches", "gathered", "skipped", "batched"]),
        (3, ["fewer clients than ranks"]),
        *(pytest.param(count, list(SETTINGS), marks=pytest.mark.slow) for count in (2, 3)),
    ],
)
def test_same_bits_at_any_number_of_ranks(
    num_ranks: int, names: list[str], alone: dict[str, Finished], tmp_path: Path
) -> None:
    _require_same(run_ranks(_runs, num_ranks, tmp_path, str(tmp_path), names), alone)


def test_same_bits_after_a_stop_at_another_number_of_ranks(alone: dict[str, Finished], tmp_path: Path) -> None:
    names = ["all", "gathered"]
    run_ranks(_runs, 2, tmp_path, str(tmp_path), names, 1)
    _require_same(run_ranks(_runs, 1, tmp_path, str(tmp_path), names), alone, since=1)


def test_what_the_runs_above_did(alone: dict[str, Finished]) -> None:
    """The weights were not shares, the draws differ by round and by method, one client was left out."""
    records = alone["all"].records
    assert 0 < records[0]["alike/least"] < 1
    assert records[0]["drawn"] != records[1]["drawn"]
    assert records[0]["server.transforms.0/draw"] != records[1]["server.transforms.0/draw"]
    assert [record["clients_skipped"] for record in alone["skipped"].records] == [1, 1]
    models = [torch.cat([t.flatten().double() for t in run.model.values()]) for run in alone.values()]
    assert all(model.isfinite().all() for model in models)
    torch.testing.assert_close(models[0], models[list(SETTINGS).index("batched")], rtol=1e-2, atol=1e-4)
    assert torch.equal(models[0], models[list(SETTINGS).index("gathered")])


def test_a_cohort_has_what_each_client_sent(tmp_path: Path) -> None:
    """At the model that was sent, in the order of the cohort; against the model and the samples themselves."""
    config = tiny([*ASKING, "rounds=1"])
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset).eval()
    [record] = run_job(config, tmp_path).records
    asking = sys.modules["tests.rounds.asking_methods"]
    (cohort,) = asking.Drawing.seen
    assert (cohort.round_index, cohort.seed, cohort.method) == (0, config.seed, "server.aggregator")
    expected = []
    for client in record["cohort"]:
        batch = federation.dataset.train.batch(torch.as_tensor(federation.clients[client]))
        with torch.no_grad():
            expected.append(module.represent(batch.inputs).double().mean(dim=0))
    found = cohort.short("mean_features")
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert cohort.short("norms")[:, 2].tolist() == [float(n) for n in cohort.clients.num_steps], "zeros at first"
    assert cohort.rows("gradient").num_rows == 3
    assert cohort.short("class_features").shape == (3, 3 * found.shape[1])


def test_who_asks_for_what_was_not_sent_is_told() -> None:
    cohort = dense_cohort(torch.ones(2, 5), uploads={"long": torch.ones(2, 5)})
    with pytest.raises(ValueError, match=r"no client sent 'mean_features'; there are: long.*in `needs`"):
        cohort.short("mean_features")
    with pytest.raises(ValueError, match=r"use cohort\.rows\('long'\)"):
        cohort.short("long")
    short = Cohort(**{**vars(cohort), "uploads": {"few": torch.ones(2, 3)}})
    with pytest.raises(ValueError, match=r"allowed of it: cohort\.short\('few'\)"):
        short.rows("few")


def test_generators_differ_by_seed_method_round_and_purpose() -> None:
    def draw(purpose: str = "", **changes: object) -> float:
        cohort = Cohort(**{**vars(dense_cohort(torch.ones(1, 2))), **changes})
        return float(torch.rand((), generator=cohort.generator(purpose)))

    keys = [{}, {"seed": 1}, {"method": "server.weights"}, {"round_index": 1}]
    assert len({*(draw(**key) for key in keys), draw("other")}) == 5
    assert draw() == draw()


def _exchanged(collectives: Collectives, folder: str) -> list[int]:
    records = run_job(tiny([PLUGIN, "local.algorithm=wide"]), Path(folder), collectives).records
    return [record["bytes_exchanged"] for record in records]


def test_the_plan_foretells_the_bytes_of_short_vectors(tmp_path: Path) -> None:
    config = tiny([PLUGIN, "local.algorithm=wide"])
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset)
    (layout,), (phase,) = check_patterns(config, module, federation.dataset), config.schedule()
    extras = extras_of(config, phase, layout, module, federation)
    assert (extras.rows, extras.short, extras.rank) == (0, 5000, 0)
    for index, measured in enumerate(run_ranks(_exchanged, 2, tmp_path, str(tmp_path))[0]):
        cohort, _, _, plan = plan_round(config, federation, index, phase, 2)
        planned = sum(
            traffic(config, phase, len(layout), 2, rank, Work(len(cohort), len(positions), 0, 0, 6, extras))
            for rank, positions in enumerate(plan)
        )
        # Where one rank has a client more, the other sends as many rows.
        assert planned <= measured <= planned + 5000 * 8 + 10_000


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (0, 0, 0)),
        (["local.algorithm={type: scaffold, option: 1}"], (1, 0, 0)),
        (["server.aggregator=fisher_diagonal"], (1, 0, 0)),
        (["server.aggregator={type: fipa, rank: 7}"], (0, 0, 7)),
        (ASKING, (2, 8 + 3 * 8 + 2 + 3, 0)),
    ],
)
def test_the_plan_knows_what_clients_send(overrides: list[str], expected: tuple[int, int, int]) -> None:
    config = tiny(overrides)
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset)
    (layout,), (phase,) = check_patterns(config, module, federation.dataset), config.schedule()
    extras = extras_of(config, phase, layout, module, federation)
    assert (extras.rows, extras.short, extras.rank) == expected
    assert (extras.working_bytes(5) > 0) == (phase.server.aggregator.type in ("fipa", "fisher_diagonal"))
