"""The device and the backend of a rank. The scheduler's mapping of GPUs to tasks is left as it is."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from fedspec_dist.processes.environment import Environment, LaunchError

_DEVICE_FILES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# What SLURM says of GPUs that it gave to a job or to a step.
_GRANTED = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
# `CUDA_VISIBLE_DEVICES` of a process that is to have no GPU; the last is SLURM's.
_NO_GPU = ("", "-1", "NoDevFiles")
_NVIDIA_SMI_S = 20


def choose_device(requested: str, environment: Environment) -> torch.device:
    """`local_rank` modulo the visible GPUs, or the CPU. The scheduler's CUDA_VISIBLE_DEVICES is left as it is.

    Raises:
        LaunchError: a GPU was asked for and none is visible, or there is one that torch cannot use.
    """
    num_visible = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if num_visible:
        return torch.device("cuda", environment.local_rank % num_visible)
    if requested != "cpu" and (sign := sign_of_a_gpu()):
        raise LaunchError(
            f"runtime.device: got {requested!r}, and there is a GPU ({sign}), but torch {torch.__version__} cannot use "
            f"it: {_why_unusable()}; or compute on the CPU: runtime.device=cpu"
        )
    if requested == "cuda":
        raise LaunchError(
            "runtime.device: got 'cuda', but no GPU is visible to this process "
            f"({_VISIBLE}={os.environ.get(_VISIBLE, 'not set')}); allowed here: cpu, auto"
        )
    return torch.device("cpu")


def sign_of_a_gpu() -> str:
    """What says that this process is to have a GPU; empty where nothing does, or where it was told to use none."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return "" if visible.strip() in _NO_GPU else f"{_VISIBLE}={visible}"
    for name in _GRANTED:
        if os.environ.get(name, "0") not in ("", "0"):
            return f"{name}={os.environ[name]}"
    for file in sorted(_DEVICE_FILES.glob("nvidia[0-9]*")):
        if _may_be_opened(file):
            return str(file)
    return _listed_by_nvidia_smi()


def _may_be_opened(file: Path) -> bool:
    """The device files of GPUs that the scheduler gave to others are there as well, but not to be opened."""
    try:
        os.close(os.open(file, os.O_RDWR))
    except PermissionError:
        return False
    except OSError:  # a driver that does not answer
        return True
    return True


def _listed_by_nvidia_smi() -> str:
    """Its first line, such as `GPU 0: NVIDIA A100 (UUID: ...)`: some containers have no device files."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
        first = listed.stdout.strip().split("\n")[0]
        if listed.returncode == 0 and first.startswith("GPU "):
            return first
    return ""


def _why_unusable() -> str:
    """What keeps torch from a GPU that is there, and what to do."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return "it was built for CPUs only. Install a build for CUDA (https://pytorch.org/get-started/locally)"
    try:
        torch.cuda.init()
        reason = "it finds no device"
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
    return (
        f"{reason}. It was built for CUDA {torch.version.cuda}: see what nvidia-smi says of the driver, and update the "
        "driver or install a build for an older CUDA (https://pytorch.org/get-started/locally)"
    )


def choose_backend(requested: str, device: torch.device, environment: Environment, num_visible: int) -> str:
    """NCCL for ranks that have a GPU each, gloo on CPUs.

    Raises:
        LaunchError: NCCL with a CPU, or with more ranks on this host than GPUs (NCCL refuses to share one).
    """
    backend = ("nccl" if device.type == "cuda" else "gloo") if requested == "auto" else requested
    if backend == "nccl" and device.type == "cpu":
        raise LaunchError("runtime.backend: got 'nccl', but this rank computes on a CPU; allowed here: gloo, auto")
    if backend == "nccl" and environment.local_num_ranks > num_visible and not _one_gpu_each(num_visible):
        raise LaunchError(
            f"{environment.local_num_ranks} ranks on {environment.host} but {num_visible} GPU(s), and NCCL cannot "
            f"share a GPU between ranks. Start with --nproc_per_node {num_visible}, or let ranks share GPUs over gloo: "
            "runtime.backend=gloo"
        )
    return backend


def _one_gpu_each(num_visible: int) -> bool:
    """A scheduler may show each task one GPU of its own (`--gpus-per-task 1`); torchrun's workers share theirs."""
    return num_visible == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
