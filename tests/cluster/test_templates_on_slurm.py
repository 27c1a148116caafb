"""The templates of `slurm/`, rendered by the command line and submitted; stopped, started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.runs import LONG, NUM_ROUNDS, TINY, environment_of, model_of, pause, rounds_of, undisturbed, until
from tests.cluster.slurm_cluster import Cluster

pytestmark = pytest.mark.cluster
# What torchrun left in the submitting shell must not get into the job.
STALE = {"MASTER_ADDR": "nowhere", "MASTER_PORT": "1", "RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "3"}
ON_TWO_NODES = [
    pytest.param("several_nodes", id="torchrun"),
    pytest.param("one_task_per_rank", id="tasks"),
]


def submit(slurm: Cluster, folder: Path, name: str, *words: str) -> str:
    folder.mkdir(exist_ok=True)
    text = slurm.run(sys.executable, "-m", "launch.templates", name, *words, folder=folder).stdout
    (folder / "job.sbatch").write_text(text)
    return slurm.submit("job.sbatch", folder=folder, **STALE)


def log_of(folder: Path, job: str) -> str:
    logs = list(folder.glob(f"*-{job}.out"))
    return logs[0].read_text() if logs else "no log"


def finish(slurm: Cluster, folder: Path, job: str) -> str:
    state = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout_s=100)
    assert state == "COMPLETED", f"{state}\n{log_of(folder, job)}"
    return log_of(folder, job)


def test_one_node_in_a_hostile_folder(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "folder" # of é 数据 & $HOME'
    finish(slurm, folder, submit(slurm, folder, "single_node", *TINY, "cluster.ranks_per_node=2"))
    assert len(environment_of(folder)["ranks"]) == 2
    assert model_of(folder) == undisturbed(TINY)


@pytest.mark.parametrize("name", ON_TWO_NODES)
def test_two_nodes_stopped_by_the_signal_start_again_with_the_same_bits(
    slurm: Cluster, tmp_path: Path, name: str
) -> None:
    pause(tmp_path, 0.3)
    job = submit(slurm, tmp_path, name, *LONG, "cluster.nodes=2", "cluster.mem_gb=1")
    until(lambda: rounds_of(tmp_path) >= 2, "round 2", timeout_s=90)
    slurm.run("scancel", "--batch", "--signal=USR2", job)  # as --signal=B:USR2 does before the time limit
    slurm.wait_for(job, "PENDING")
    pause(tmp_path, 0)
    log = finish(slurm, tmp_path, job)
    assert "stopped with a checkpoint: the job goes back into the queue" in log
    assert environment_of(tmp_path)["ranks"] == ["node1 cpu", "node2 cpu"]
    assert 2 <= environment_of(tmp_path)["resumed_after_round"] < NUM_ROUNDS, log
    assert model_of(tmp_path) == undisturbed(LONG)


def test_an_array_of_which_one_run_is_stopped(slurm: Cluster, tmp_path: Path) -> None:
    runs = ("--run", "seed=0 output=runs-0", "--run", "seed=1 output=runs-1")
    pause(tmp_path, 0.3)
    job = submit(slurm, tmp_path, "array", *LONG, *runs, "cluster.max_requeues=0", "cluster.array_parallelism=2")

    def rounds(index: int) -> int:
        files = list(tmp_path.glob(f"runs-{index}/*/metrics.jsonl"))
        return files[0].read_text().count("\n") if files else 0

    until(lambda: rounds(0) >= 2 and rounds(1) >= 2, "round 2", timeout_s=90)
    # The last run of an array has the array's own number as its job's.
    slurm.run("scancel", "--batch", "--signal=USR2", f"{job}_1")
    slurm.wait_for(f"{job}_1", "FAILED")
    pause(tmp_path, 0)
    slurm.wait_for(f"{job}_0", "COMPLETED")
    assert rounds(0) == NUM_ROUNDS
    assert rounds(1) < NUM_ROUNDS
    assert "after 0 new starts for good: submit it again to go on" in log_of(tmp_path, job)
