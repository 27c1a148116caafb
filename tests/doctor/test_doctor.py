"""The doctor as it is called: alone, as several tasks, and where something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedspec_dist.doctor import main
from tests.end_to_end.cli import Ended, Job
from tests.end_to_end.hosts import NoHostsError, two_hosts

COMMAND = [sys.executable, "-m", "fedspec_dist.doctor"]
WIDE = {"COLUMNS": "200"}
CHECKS = [
    "versions",
    "config",
    "devices",
    "collectives",
    "run folder",
    "data set",
    "ports",
    "network",
    "CPUs",
    "clocks",
]


def _doctor(folder: Path, *arguments: str, **variables: str) -> Ended:
    with Job([*COMMAND, *arguments], folder, WIDE | variables) as job:
        return job.wait(60)


def _step(rank: int, num_ranks: int, nodes: int = 1) -> dict[str, str]:
    per_node = num_ranks // nodes
    return WIDE | {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(num_ranks),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_LOCALID": str(rank % per_node),
    }


def test_alone_it_is_healthy_and_leaves_nothing(tmp_path: Path) -> None:
    ended = _doctor(tmp_path, "output=deep/runs").expect(0, *CHECKS, "1 rank(s) on ")
    assert "\nhealthy" in ended.output
    assert not (tmp_path / "deep" / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nosuch=1"], 2, "config error: nosuch: unknown key"),
        (["a.yaml", "b.yaml"], 2, "config error: one config file, got a.yaml, b.yaml"),
        (["output=/proc/nothing"], 1, "First thing to fix: run folder: rank 0 on "),
        (["data.dataset=npz", "data.path=/nonexistent/x.npz"], 1, "First thing to fix: data set: on "),
        (["runtime.device=cuda"], 1, "First thing to fix: devices: "),
        (
            ["runtime.backend=nccl"],
            1,
            "First thing to fix: devices: rank 0: runtime.backend: got 'n",
        ),
    ],
)
def test_what_is_wrong_comes_last_in_plain_words(
    arguments: list[str], code: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available() and code == 1 and arguments[0].startswith("runtime."):
        pytest.skip("there is a GPU")
    assert main([f"output={tmp_path}/runs", *arguments]) == code
    captured = capfd.readouterr()
    assert message in (captured.err if code == 2 else captured.out.splitlines()[-1])
    assert "Traceback" not in captured.err


def test_a_wrong_launch_is_the_first_thing_to_fix(tmp_path: Path) -> None:
    _doctor(tmp_path, RANK="0", WORLD_SIZE="2").expect(1, "error: first thing to fix: LOCAL_RANK, MASTER_ADDR")


def test_a_gpu_that_torch_cannot_use_is_not_healthy(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = _doctor(tmp_path, CUDA_VISIBLE_DEVICES="0").expect(
        1, "error: first thing to fix: runtime.device: got 'auto'"
    )
    assert "healthy" not in ended.output
    _doctor(tmp_path, "runtime.device=cpu", CUDA_VISIBLE_DEVICES="0").expect(0, "healthy")


@pytest.mark.slow
def test_three_tasks_measure_what_is_between_them(tmp_path: Path) -> None:
    jobs = [Job(COMMAND, tmp_path, _step(rank, 3)) for rank in range(3)]
    with jobs[0], jobs[1], jobs[2]:
        first, *others = [job.wait(60) for job in jobs]
    first.expect(0, "3 rank(s) on ", "all-to-all", "all-gather", "all-reduce", "MB/s a rank", "\nhealthy")
    assert [(other.code, other.output) for other in others] == [(0, ""), (0, "")]
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_the_first_thing_to_fix(tmp_path: Path) -> None:
    with Job([*COMMAND, "runtime.timeout_s=6"], tmp_path, _step(0, 2)) as job:
        job.wait(60).expect(1, "error: first thing to fix: rank 0 on ", "ranks [1] did not come within 6 s")


@pytest.mark.slow
def test_two_hosts_with_folders_of_their_own(tmp_path: Path) -> None:
    """Each has another folder under the same name, as with a path on a local disk; an address is given them."""
    try:
        with two_hosts(tmp_path, "slow") as hosts:
            address = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
            script = f"mkdir -p own runs && mount -t tmpfs none runs && exec {' '.join(COMMAND)}"
            jobs = [
                Job(hosts.command(host, "sh", "-c", script), tmp_path, _step(host, 2, 2) | address) for host in range(2)
            ]
            with jobs[0], jobs[1]:
                first, second = [job.wait(60) for job in jobs]
    except NoHostsError as error:
        pytest.skip(f"two hosts cannot be had here: {error}")
    message = f"First thing to fix: run folder: {tmp_path}/runs is not the same folder on node1 and node2 (rank 1)."
    first.expect(1, "2 rank(s) on node1, node2", message, "output=FOLDER on a file system that all hosts share")
    assert second.code == 1
