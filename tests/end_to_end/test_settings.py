"""Settings of the runtime, and promises of `--plan`, against whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedspec_dist.config import load
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.memory import Work
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.rounds.plan import extras_of, plan_round, traffic
from tests.end_to_end.cli import results_of, run, run_folder

pytestmark = pytest.mark.slow

SMALL = ["rounds=2", "local.epochs=1", "runtime.deterministic=true"]


@pytest.mark.parametrize("aggregator", ["fedgh", "{type: fipa, rank: 4, merge: tsqr}"])
def test_deterministic_kernels_and_two_threads_give_the_same_bits_on_one_and_two_ranks(
    aggregator: str, tmp_path: Path
) -> None:
    settings = [*SMALL, "runtime.threads_per_rank=2", f"server.aggregator={aggregator}"]
    run(tmp_path, *settings, "output=one").expect(0)
    run(tmp_path, *settings, "output=two", ranks=2).expect(0)
    assert results_of(tmp_path, "one") == results_of(tmp_path, "two")


@pytest.mark.parametrize(
    "overrides",
    [
        ["server.aggregator=fedgh"],
        ["server.aggregator={type: fipa, rank: 4}"],
        ["runtime.aggregation=gather"],
        ["local.algorithm=fedcm"],
        ["server.aggregator=fisher_diagonal"],
        ["local.epochs={min: 1, max: 3}", "dropout=0.2", "sampling=bernoulli"],
    ],
)
def test_the_plan_foretells_the_bytes(overrides: list[str], tmp_path: Path) -> None:
    settings = [*SMALL, *overrides]
    run(tmp_path, *settings, ranks=3).expect(0)
    lines = (run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()
    config = load(None, settings)
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset)
    (layout,) = check_patterns(config, module, federation.dataset)
    (phase,) = config.schedule()
    extras = extras_of(config, phase, layout, module, federation)
    for index, line in enumerate(lines):
        cohort, _, _, plan = plan_round(config, federation, index, config.schedule()[0], 3)
        planned = sum(
            traffic(config, phase, len(layout), 3, rank, Work(len(cohort), len(positions), 0, 0, 20, extras))
            for rank, positions in enumerate(plan)
        )
        measured = json.loads(line)["bytes_exchanged"]
        # What the plan leaves out: tables of results and times, Gram matrices, sums of the evaluation.
        assert planned <= measured <= 1.1 * planned


def test_a_mistake_in_a_later_phase_ends_the_run_before_its_first_round(tmp_path: Path) -> None:
    ended = run(tmp_path, "phases=[{rounds: 1}, {rounds: 1, trainable: ['nosuch*']}]", ranks=2)
    ended.expect_failure("phases.1.trainable: 'nosuch*' matches no parameter")
    assert "round 1/2" not in ended.output
