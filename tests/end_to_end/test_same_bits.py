"""The same parameters and metrics, bit for bit, whatever the number of ranks and the way of aggregating."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.cli import metrics_of, results_of, run

pytestmark = pytest.mark.slow

# 3,364 parameters in the first (four column blocks): 3 and 8 ranks do not divide them. Five clients a round: with 8
# ranks some have none.
DATA = [
    "data.dataset=synthetic",
    "data.shape=[1, 8, 8]",
    "data.num_classes=4",
    "data.num_train=400",
    "data.num_test=130",
    "data.partition.clients=8",
    "eval.batch_size=50",
    "local.epochs=1",
    "local.batch_size=20",
    "clients_per_round=5",
]
CONFIGS = {
    "filter and fedgh": [
        *DATA,
        "model={type: mlp, hidden: [40, 16]}",
        "rounds=5",
        "server.aggregator=fedgh",
        "local.momentum=0.5",
        "data.augment=[flip, {type: crop, padding: 1}]",
    ],
    "fedavg, then fipa": [
        *DATA,
        "model.width=6",
        "filter=none",
        "phases=[{rounds: 3}, {rounds: 2, local: {lr: 0.01}, server: {aggregator: {type: fipa, rank: 3}}}]",
    ],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits_at_1_2_3_4_and_8_ranks_and_gathered(name: str, tmp_path: Path) -> None:
    overrides = CONFIGS[name]
    run(tmp_path, *overrides, "output=plain").expect(0, "run folder: plain/")
    expected = results_of(tmp_path, "plain")
    assert [record["round"] for record in expected[1]] == [1, 2, 3, 4, 5]
    for ranks in (1, 2, 3, 4, 8):
        output = f"ranks{ranks}"
        run(tmp_path, *overrides, f"output={output}", ranks=ranks).expect(0)
        assert results_of(tmp_path, output) == expected, f"{ranks} ranks differ from one process"
    run(tmp_path, *overrides, "output=gather", "runtime.aggregation=gather", ranks=3).expect(0)
    assert results_of(tmp_path, "gather") == expected, "gathered differs from sharded"


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path, *CONFIGS["filter and fedgh"], f"output=seed{seed}", f"seed={seed}", "rounds=1").expect(0)
    assert results_of(tmp_path, "seed0")[0] != results_of(tmp_path, "seed1")[0]
    assert metrics_of(tmp_path, "seed0") != metrics_of(tmp_path, "seed1")


def test_the_default_run_learns_in_less_than_a_minute(tmp_path: Path) -> None:
    ended = run(tmp_path, timeout_s=60).expect(0, "round 20/20", "final_test_accuracy", "run folder: runs/")
    assert ended.seconds < 60
    metrics = metrics_of(tmp_path)
    assert len(metrics) == 20
    assert metrics[-1]["test_accuracy"] > 0.85  # README: 0.88
    assert metrics[-1]["test_loss"] < metrics[0]["test_loss"]
