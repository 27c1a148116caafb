"""srun and the ranks: who is who, which GPU is whose, where they meet, and what the doctor says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.runs import TINY, environment_of, model_of, undisturbed
from tests.cluster.slurm_cluster import Cluster

pytestmark = pytest.mark.cluster
MAIN = (sys.executable, "-m", "fedspec_dist.main")
# choose_device on a rank, with as many GPUs as CUDA_VISIBLE_DEVICES names.
DEVICES = """
import os, torch
visible = os.environ["CUDA_VISIBLE_DEVICES"]
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: len(visible.split(","))
from fedspec_dist.processes.devices import choose_device
from fedspec_dist.processes.environment import read_environment
rank = read_environment()
print(f"rank {rank.rank} of {rank.num_ranks}: {choose_device('auto', rank)} of {visible}", flush=True)
"""


def test_each_task_of_srun_is_a_rank_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    slurm.run("srun", "-N2", "--kill-on-bad-exit=1", *MAIN, *TINY, folder=tmp_path, timeout_s=100)
    assert environment_of(tmp_path)["ranks"] == ["node1 cpu", "node2 cpu"]
    assert model_of(tmp_path) == undisturbed(TINY)


def test_two_jobs_on_one_host_at_the_same_time_keep_apart(slurm: Cluster, tmp_path: Path) -> None:
    command = ("srun", "-w", "node1", "-n2", "--mem=500M", *MAIN, *TINY)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with slurm.start_command(*command, folder=tmp_path / "a") as other:
        slurm.run(*command, folder=tmp_path / "b", timeout_s=120)
        assert other.wait(60) == 0
    assert environment_of(tmp_path / "a")["ranks"] == ["node1 cpu", "node1 cpu"]
    assert model_of(tmp_path / "a") == model_of(tmp_path / "b") == undisturbed(TINY)


@pytest.mark.parametrize(
    ("request_gpus", "expected"),
    [
        pytest.param("--gpus-per-task=1", ["rank 0 of 2: cuda:0 of 0", "rank 1 of 2: cuda:0 of 1"], id="one_each"),
        pytest.param("--gpus-per-node=2", ["rank 0 of 2: cuda:0 of 0,1", "rank 1 of 2: cuda:1 of 0,1"], id="shared"),
    ],
)
def test_a_rank_takes_a_gpu_that_slurm_gave_it(slurm: Cluster, request_gpus: str, expected: list[str]) -> None:
    output = slurm.run("srun", "-N1", "-n2", request_gpus, sys.executable, "-c", DEVICES).stdout
    assert sorted(line for line in output.splitlines() if line.startswith("rank")) == expected


def test_a_wrong_config_is_said_once_and_by_srun_too(slurm: Cluster, tmp_path: Path) -> None:
    result = slurm.run("srun", "-N2", "-n4", *MAIN, "rounds=0", folder=tmp_path, check=False)
    assert result.returncode == 2
    assert result.stdout.count("config error") == 1, result.stdout
