"""What the launcher says about this process, and the device that follows from it. No process group yet."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch


class LaunchError(ValueError):
    """The way the job was started, or the machine, does not fit the config; the message says what to change."""


@dataclass(frozen=True)
class Environment:
    """`launched` is False for a plain `python -m fedspec_dist.main`: one process, no rendezvous, no port."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_num_ranks: int = 1
    launched: bool = False
    restarts: int = 0  # of the same job, by torchrun or by SLURM

    @property
    def host(self) -> str:
        return socket.gethostname()


_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def read_environment(variables: dict[str, str] | None = None) -> Environment:
    """The environment that torchrun sets, checked.

    Raises:
        LaunchError: only some of torchrun's variables are set, or several SLURM tasks were started without it, or
            torchrun was started inside each of several tasks of one node.
    """
    variables = dict(os.environ) if variables is None else variables
    restarts = _count(variables, "TORCHELASTIC_RESTART_COUNT") + _count(variables, "SLURM_RESTART_COUNT")
    missing = [name for name in _NAMES if name not in variables]
    tasks_per_node = variables.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0]
    if len(missing) == len(_NAMES) or (missing and set(missing) >= {"RANK", "WORLD_SIZE"}):
        if _count(variables, "SLURM_STEP_NUM_TASKS", 1) > 1:
            raise LaunchError(
                f"srun started {variables['SLURM_STEP_NUM_TASKS']} tasks of fedspec_dist.main without torchrun: each "
                "would run the whole experiment. Start one task per node and torchrun inside it: "
                "srun --ntasks-per-node 1 torchrun --nproc_per_node GPUS -m fedspec_dist.main ..."
            )
        return Environment(restarts=restarts)
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set, but {', '.join(n for n in _NAMES if n in variables)} are: start with "
            "torchrun, which sets all of them, or unset them to run one process"
        )
    if "TORCHELASTIC_RUN_ID" in variables and tasks_per_node.isdigit() and int(tasks_per_node) > 1:
        raise LaunchError(
            f"two launch styles at once: srun started {tasks_per_node} tasks on this node and each started torchrun. "
            "Use srun --ntasks-per-node 1 with one torchrun per node"
        )
    rank, num_ranks, local_rank = (_count(variables, name) for name in _NAMES[:3])
    if rank >= num_ranks:
        raise LaunchError(f"RANK is {rank} but WORLD_SIZE is {num_ranks}: ranks count from 0 to WORLD_SIZE - 1")
    # Started by hand, the ranks of this host are not known; torchrun says.
    local_num_ranks = _count(variables, "LOCAL_WORLD_SIZE", 1)
    return Environment(rank, num_ranks, local_rank, local_num_ranks, True, restarts)


def _count(variables: dict[str, str], name: str, default: int = 0) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal():
        raise LaunchError(f"{name}: got {text!r} in the environment; allowed: a number from 0. torchrun sets it")
    return int(text)


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
