"""The device and the backend of a rank. The scheduler's mapping of GPUs to tasks is left as it is."""

from __future__ import annotations

import os

import torch

from fedspec_dist.distributed.environment import Environment, LaunchError


def choose_device(requested: str, environment: Environment) -> torch.device:
    """`local_rank` modulo the visible GPUs, or the CPU. The scheduler's CUDA_VISIBLE_DEVICES is left as it is.

    Raises:
        LaunchError: a GPU was asked for and none is visible.
    """
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cuda" and not num_visible:
        raise LaunchError(
            "runtime.device: got 'cuda', but no GPU is visible to this process "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); allowed here: cpu, auto"
        )
    if requested == "cpu" or not num_visible:
        return torch.device("cpu")
    return torch.device("cuda", environment.local_rank % num_visible)


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
