"""The doctor inside a job, and a sweep as a job array, on a real SLURM."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.runs import undisturbed
from tests.cluster.slurm_cluster import Cluster

pytestmark = pytest.mark.cluster
SWEEP = """
overrides: [rounds=2, local.epochs=1]
seeds: [0, 1]
methods:
  fedavg: {overrides: [filter=none]}
  specgrad:
"""


def test_the_doctor_examines_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "launch.submit", "--doctor", "--nodes", "2", "--follow")
    output = slurm.run(*command, folder=tmp_path, timeout_s=150, variables={"COLUMNS": "200"}).stdout
    assert "node1" in output
    assert "node2" in output
    assert re.search(r"all.to.all", output), output
    assert "finished" in output.splitlines()[-1]


def test_a_sweep_is_a_job_array_and_finished_runs_are_not_run_again(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)

    def sweep(*words: str) -> str:
        command = (sys.executable, "-m", "launch.sweep", "sweep.yaml", *words)
        return slurm.run(*command, folder=tmp_path, timeout_s=150, variables={"COLUMNS": "200"}).stdout

    sweep("--cluster", "slurm", "--wait", "cluster.array_parallelism=2", "cluster.mem_gb=0.5")
    sweep("--collect", "results.csv")
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["method"], row["seed"], row["state"]) for row in rows] == [
        ("fedavg", "0", "finished"),
        ("fedavg", "1", "finished"),
        ("specgrad", "0", "finished"),
        ("specgrad", "1", "finished"),
    ]
    jobs = slurm.lines("squeue", "-h", "--states=all", "-o", "%F")
    sweep("--cluster", "slurm", "--wait")
    assert slurm.lines("squeue", "-h", "--states=all", "-o", "%F") == jobs
    models = list(tmp_path.glob("runs/*/model.safetensors"))
    assert len(models) == 4
    assert undisturbed(("rounds=2", "local.epochs=1", "seed=1")) in [path.read_bytes() for path in models]
