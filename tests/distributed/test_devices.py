"""Which device and backend a rank takes, and what is said when it cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedspec_dist.processes import devices
from fedspec_dist.processes.devices import choose_backend, choose_device
from fedspec_dist.processes.environment import Environment, LaunchError, read_environment

SCHEDULER = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


@pytest.fixture(autouse=True)
def _a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests say what there is."""
    for name in SCHEDULER:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(devices, "_DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


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
    assert str(choose_device("auto", Environment())) == "cpu"
    with pytest.raises(
        LaunchError, match=r"runtime\.device: got 'cuda', but no GPU .*CUDA_VISIBLE_DEVICES=not set.*cpu, auto"
    ):
        choose_device("cuda", Environment())


def _nvidia_smi(folder: Path, code: int, says: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    (folder / "bin" / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize("requested", ["auto", "cuda"])
@pytest.mark.parametrize("sign", [*SCHEDULER, "device file", "nvidia-smi"])
def test_a_gpu_that_torch_cannot_use_is_never_silently_the_cpu(
    sign: str, requested: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _gpus(monkeypatch, 0)
    expected = f"{sign}=1"
    if sign == "device file":
        (tmp_path / "dev" / "nvidia0").touch()
        expected = "nvidia0"
    elif sign == "nvidia-smi":
        expected = "GPU 0: NVIDIA H200 (UUID: GPU-1)"
        _nvidia_smi(tmp_path, 0, expected)
    else:
        monkeypatch.setenv(sign, "1")
    with pytest.raises(LaunchError, match=rf"runtime\.device: got '{requested}', and there is a GPU") as raised:
        choose_device(requested, Environment())
    assert expected in str(raised.value)
    assert str(raised.value).endswith("or compute on the CPU: runtime.device=cpu")
    assert str(choose_device("cpu", Environment())) == "cpu"


def test_what_is_wrong_with_the_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore lines")

    _gpus(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(
        LaunchError, match=r"driver on your system is too old .*built for CUDA 13\.0.*update the driver"
    ):
        choose_device("auto", Environment())
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LaunchError, match=r"built for CPUs only\. Install a build for CUDA"):
        choose_device("auto", Environment())


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_process_that_is_to_have_no_gpu_computes_on_the_cpu(
    visible: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though the machine has one."""
    _gpus(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "dev" / "nvidia0").touch()
    assert str(choose_device("auto", Environment())) == "cpu"


def test_the_gpus_of_other_jobs_and_none_at_all_are_no_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    _gpus(monkeypatch, 0)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    _nvidia_smi(tmp_path, 9, "No devices were found")
    monkeypatch.setattr(os, "open", refuse)
    assert str(choose_device("auto", Environment())) == "cpu"


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


@pytest.mark.parametrize(
    ("num_visible", "expected"),
    [
        (4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),  # --gpus-per-node 4: a task sees all
        (1, ["cuda:0"] * 4),  # --gpus-per-task 1: each sees its own, numbered from 0
        (2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),  # more tasks than GPUs
    ],
)
def test_tasks_take_the_gpus_that_the_scheduler_shows_them(
    num_visible: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpus(monkeypatch, num_visible)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "the scheduler's")
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}
    step |= {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    tasks = [
        read_environment(step | {"SLURM_PROCID": str(4 + local), "SLURM_LOCALID": str(local)}) for local in range(4)
    ]
    assert [str(choose_device("auto", task)) for task in tasks] == expected
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "the scheduler's"
