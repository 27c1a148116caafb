"""What the launcher says about this process: torchrun's variables, a SLURM task, or a task of submitit on one host.

No process group and no torch yet.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedspec_dist.core.failures import Kind
from fedspec_dist.processes.orphans import identity, launcher_pid

log = logging.getLogger(__name__)


class LaunchError(ValueError):
    """The way the job was started, or the machine, does not fit the config; the message says what to change.

    `everywhere`: every rank finds the same, so that one of them says it.
    """

    kind = Kind.LAUNCH

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


@dataclass(frozen=True)
class Environment:
    """`launched` is False for a plain `python -m fedspec_dist.main`: one process, no rendezvous, no port."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_num_ranks: int = 1
    launched: bool = False
    restarts: int = 0  # of the same job, by torchrun or by SLURM
    # Names this start of the job, the same on all its ranks; empty where the launcher gives an address to meet at.
    attempt: str = ""
    # The launcher process on this host, by its unique name, where there is one whose ranks could outlive it.
    launcher: str = ""
    group: int = 0  # which of several such launchers this is, as torchrun counts nodes

    @property
    def host(self) -> str:
        return socket.gethostname()


@dataclass(frozen=True)
class _Task:
    """A process that the scheduler started, and the variables that say so."""

    rank: int
    num_ranks: int
    local_rank: int
    local_num_ranks: int
    job: str
    names: tuple[str, str, str]  # of the variables of rank, num_ranks and local_rank


_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
_SUBMITIT = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID")


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The rank of this process, from the launcher that is nearest to it. One task of a scheduler is one rank.

    Raises:
        LaunchError: only some of torchrun's variables are set, or they say other than the scheduler, or torchrun was
            started inside each of several tasks of one node.
    """
    variables = os.environ if variables is None else variables
    restarts = _count(variables, "TORCHELASTIC_RESTART_COUNT") + _count(variables, "SLURM_RESTART_COUNT")
    task = _task(variables)
    if _TORCHRUN in variables:
        _refuse_torchrun_in_each_of(task)
    elif task is not None and task.num_ranks > 1:
        return _from_task(task, variables, restarts)
    missing = [name for name in _NAMES if name not in variables]
    if len(missing) == len(_NAMES) or (missing and set(missing) >= {"RANK", "WORLD_SIZE"}):
        _warn_of_idle_tasks(variables, started_by_srun=task is not None)
        return Environment(restarts=restarts)
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set, but {', '.join(n for n in _NAMES if n in variables)} are: start with "
            "torchrun, which sets all of them, or unset them to run one process",
            everywhere=True,
        )
    rank, num_ranks, local_rank = (_count(variables, name) for name in _NAMES[:3])
    if rank >= num_ranks:
        raise LaunchError(f"RANK is {rank} but WORLD_SIZE is {num_ranks}: ranks count from 0 to WORLD_SIZE - 1")
    # Started by hand, the ranks of this host are not known; torchrun says.
    local_num_ranks = _count(variables, "LOCAL_WORLD_SIZE", 1)
    pid = launcher_pid(_TORCHRUN) if variables is os.environ and _TORCHRUN in variables else None
    return Environment(
        rank,
        num_ranks,
        local_rank,
        local_num_ranks,
        True,
        restarts,
        launcher=identity(pid) if pid is not None else "",
        group=_count(variables, "GROUP_RANK"),
    )


def is_first(variables: Mapping[str, str] | None = None) -> bool:
    """Whether this is the process that speaks for the job, however it was started; never raises."""
    variables = os.environ if variables is None else variables
    ranks = [variables[name] for name in ("RANK", _SUBMITIT[0], _SLURM[0]) if name in variables]
    return not ranks or ranks[0] == "0"


def name_of_start(variables: Mapping[str, str] | None = None) -> tuple[str, str | None]:
    """A name that all ranks of this start of the job share and no other start has, and the scheduler's job id."""
    variables = os.environ if variables is None else variables
    job_id = variables.get("SUBMITIT_LOCAL_JOB_ID", variables.get("SLURM_JOB_ID"))
    if "SLURM_ARRAY_JOB_ID" in variables and "SUBMITIT_LOCAL_JOB_ID" not in variables:
        job_id = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables.get('SLURM_ARRAY_TASK_ID', '')}"
    names = ("SLURM_STEP_ID", "SLURM_RESTART_COUNT", _TORCHRUN, "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    parts = [job_id, *(variables.get(name) for name in names)]
    return ".".join(filter(None, parts)) or f"{socket.gethostname()}.{os.getpid()}", job_id


def tell_launcher(message: str, variables: Mapping[str, str] | None = None) -> None:
    """Why this rank ends, for torchrun to repeat: a traceback of its own is the last that it prints.

    It names a file for that, and shows what it finds there under `Root Cause`.
    """
    variables = os.environ if variables is None else variables
    if path := variables.get("TORCHELASTIC_ERROR_FILE"):
        text = json.dumps({"message": message, "timestamp": int(time.time())})
        with contextlib.suppress(OSError):
            Path(path).write_text(text, encoding="utf-8")


def _task(variables: Mapping[str, str]) -> _Task | None:
    if _SUBMITIT[0] in variables:  # nearer than a SLURM job around it
        rank, num_ranks, local_rank = (_count(variables, name) for name in _SUBMITIT)
        job = f"local-{variables.get('SUBMITIT_LOCAL_JOB_ID', 0)}"
        return _Task(rank, num_ranks, local_rank, num_ranks, job, _SUBMITIT)
    # A batch script has variables of its job, but only srun starts steps, and only a step's tasks are ranks.
    if _SLURM[1] not in variables:
        return None
    num_ranks = _count(variables, _SLURM[1])
    if num_ranks < 2:
        return _Task(0, 1, 0, 1, "", _SLURM)
    missing = [name for name in (*_SLURM, "SLURM_JOB_ID", "SLURM_STEP_ID") if name not in variables]
    if missing and _TORCHRUN not in variables:
        raise LaunchError(
            f"{', '.join(missing)} not set, but SLURM_STEP_NUM_TASKS is {num_ranks}: srun sets all of them; start with "
            "srun python -m fedspec_dist.main ..., or unset SLURM_STEP_NUM_TASKS to run one process",
            everywhere=True,
        )
    per_node = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = _count(variables, "SLURM_NODEID")
    job = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
    rank, local_rank = _count(variables, _SLURM[0]), _count(variables, _SLURM[2])
    return _Task(rank, num_ranks, local_rank, per_node[min(node, len(per_node) - 1)], job, _SLURM)


def tasks_per_node(text: str) -> list[int]:
    """SLURM's `2(x3),1` as [2, 2, 2, 1].

    Raises:
        LaunchError: it is not of this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE: got {text!r} in the environment; allowed: such as 4(x2),1. srun sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _from_task(task: _Task, variables: Mapping[str, str], restarts: int) -> Environment:
    if task.rank >= task.num_ranks:
        name, total = task.names[:2]
        raise LaunchError(f"{name} is {task.rank} but {total} is {task.num_ranks}: ranks count from 0")
    # Hooks of containers set torchrun's variables from the scheduler's. Left over from another job, they are wrong.
    for name, theirs, value in zip(_NAMES, task.names, (task.rank, task.num_ranks, task.local_rank), strict=False):
        if variables.get(name, str(value)) != str(value):
            raise LaunchError(
                f"{name} is {variables[name]} but {theirs} is {value}: exported by hand or left over from another job. "
                f"unset {' '.join(_NAMES)} before the tasks are started: they take their ranks from the scheduler",
                everywhere=name == "WORLD_SIZE",
            )
    given = "MASTER_ADDR" in variables and "MASTER_PORT" in variables
    attempt = "" if given else f"{task.job}.{restarts}"
    return Environment(task.rank, task.num_ranks, task.local_rank, task.local_num_ranks, True, restarts, attempt)


def _refuse_torchrun_in_each_of(task: _Task | None) -> None:
    if task is not None and task.local_num_ranks > 1:
        raise LaunchError(
            f"two launch styles at once: {task.local_num_ranks} tasks were started on this node and each started "
            "torchrun. Use srun --ntasks-per-node 1 with one torchrun per node, or several tasks without torchrun",
            everywhere=True,
        )


def _warn_of_idle_tasks(variables: Mapping[str, str], started_by_srun: bool) -> None:
    if not started_by_srun and _count(variables, "SLURM_NTASKS", 1) > 1:
        log.warning(
            "this SLURM job has %s tasks, but one process runs alone: srun did not start it. For a rank in each task: "
            "srun python -m fedspec_dist.main ...",
            variables["SLURM_NTASKS"],
        )


def _count(variables: Mapping[str, str], name: str, default: int = 0) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal():
        raise LaunchError(
            f"{name}: got {text!r} in the environment; allowed: a number from 0. The launcher (torchrun, srun) sets it"
        )
    return int(text)
