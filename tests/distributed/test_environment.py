"""What the launcher's environment means, and what is said when it makes no sense."""

from __future__ import annotations

import pytest
import torch

from fedspec_dist.distributed.environment import (
    Environment,
    LaunchError,
    choose_backend,
    choose_device,
    read_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node3",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchruns_variables() -> None:
    assert read_environment(TORCHRUN) == Environment(5, 8, 1, 4, True, restarts=2)


def test_a_plain_process_is_one_rank() -> None:
    assert read_environment({}) == Environment()
    # A batch script may export an address without starting ranks; an allocation sets variables for the job.
    assert read_environment({"MASTER_ADDR": "x", "MASTER_PORT": "1", "SLURM_NTASKS": "4"}) == Environment()
    assert read_environment({"SLURM_STEP_NUM_TASKS": "1", "SLURM_RESTART_COUNT": "1"}) == Environment(restarts=1)


def test_one_task_a_node_with_torchrun_inside() -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert read_environment(TORCHRUN | slurm).num_ranks == 8


def test_a_launcher_that_gives_each_task_its_rank() -> None:
    variables = {key: value for key, value in TORCHRUN.items() if not key.startswith("TORCHELASTIC")}
    slurm = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert read_environment(variables | slurm) == Environment(5, 8, 1, 4, True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"srun started 4 tasks .* without torchrun.*--ntasks-per-node 1 torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set, but RANK, WORLD_SIZE are"),
        (TORCHRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, r"two launch styles at once: srun started 4 tasks"),
        (TORCHRUN | {"RANK": "one"}, r"RANK: got 'one' in the environment; allowed: a number from 0"),
        (TORCHRUN | {"WORLD_SIZE": ""}, r"WORLD_SIZE: got ''"),
        (TORCHRUN | {"RANK": "8"}, r"RANK is 8 but WORLD_SIZE is 8"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment(variables)


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_devices_are_the_local_rank_modulo_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 2)
    ranks = [Environment(local_rank=rank, local_num_ranks=4) for rank in range(4)]
    assert [str(choose_device("auto", rank)) for rank in ranks] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert str(choose_device("cpu", ranks[1])) == "cpu"


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert str(choose_device("auto", Environment())) == "cpu"
    with pytest.raises(
        LaunchError, match=r"runtime\.device: got 'cuda', but no GPU .*CUDA_VISIBLE_DEVICES=7.*cpu, auto"
    ):
        choose_device("cuda", Environment())


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    four = Environment(local_num_ranks=4, num_ranks=4)
    assert choose_backend("auto", cpu, four, 0) == "gloo"
    assert choose_backend("auto", gpu, four, 4) == "nccl"
    assert choose_backend("gloo", gpu, four, 1) == "gloo"
    assert choose_backend("auto", gpu, four, 1) == "nccl"  # each task sees its own GPU only
    with pytest.raises(LaunchError, match=r"got 'nccl', but this rank computes on a CPU; allowed here: gloo, auto"):
        choose_backend("nccl", cpu, four, 0)


@pytest.mark.parametrize(("num_visible", "run_id"), [(2, None), (1, "x")])
def test_nccl_with_more_ranks_than_gpus_is_refused_with_advice(
    num_visible: int, run_id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    environment = Environment(local_num_ranks=4, num_ranks=4)
    message = rf"4 ranks on .* but {num_visible} GPU\(s\).*--nproc_per_node {num_visible}, .*runtime\.backend=gloo"
    with pytest.raises(LaunchError, match=message):
        choose_backend("auto", torch.device("cuda", 0), environment, num_visible)
