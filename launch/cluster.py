"""What the `cluster` section means to SLURM: how many ranks where, and the text that sbatch gets. Pure functions."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from fedspec_dist.config import Cluster, Config, ConfigError, minutes

ROOT = Path(__file__).resolve().parents[1]  # where this code is found
CLUSTERS = ("slurm", "local", "debug")

# What torchrun or another launcher may have left in the submitting shell; here every task is one rank.
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)

# sbatch options that have a key of their own in `cluster`, and those that the launcher needs for itself.
_OWN_KEYS = {
    "nodes": "nodes",
    "gpus-per-node": "gpus_per_node",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "cpus_per_rank",
    "mem": "mem_gb",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "exclude": "exclude",
    "signal": "signal_before_s",
}
_RESERVED = ("array", "chdir", "error", "job-name", "no-requeue", "ntasks", "open-mode", "output", "requeue", "wait")
# With these sbatch submits nothing, or does not say what: the launcher would not know of its job.
_SILENCING = ("help", "parsable", "quiet", "test-only", "usage", "version", "wrap")
# A limit is looked at every 30 s, so a signal comes up to 30 s early.
_CHECK_S = 30


@dataclass(frozen=True)
class Layout:
    """One task is one rank."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def layout(cluster: Cluster) -> Layout:
    """A rank for each GPU, unless `ranks_per_node` says otherwise; one rank a node without GPUs."""
    gpus = cluster.gpus_per_node or 0
    return Layout(cluster.nodes, cluster.ranks_per_node or gpus or 1, gpus)


def check(config: Config, where: str) -> Layout:
    """The layout, when this config can be submitted to `where`.

    Raises:
        ConfigError: naming the key, what was given, and what to do.
    """
    cluster, shape = config.cluster, layout(config.cluster)
    if where not in CLUSTERS:
        raise ConfigError(f"--cluster: got {where!r}; allowed: {', '.join(CLUSTERS)}")
    if where != "slurm" and shape.nodes > 1:
        raise ConfigError(f"cluster.nodes: got {shape.nodes}, but --cluster {where} is this machine; allowed: 1")
    if where == "debug" and shape.ranks > 1:
        raise ConfigError(
            f"cluster.ranks_per_node: got {shape.ranks_per_node}, but --cluster debug is this process; allowed: 1"
        )
    if config.runtime.device == "cuda" and cluster.gpus_per_node == 0:
        raise ConfigError(
            "runtime.device: got 'cuda' with cluster.gpus_per_node 0; ask for GPUs with --gpus-per-node, or set "
            "runtime.device=auto"
        )
    if 0 < shape.gpus_per_node < shape.ranks_per_node and config.runtime.backend != "gloo":
        raise ConfigError(
            f"cluster.ranks_per_node: got {shape.ranks_per_node} with {shape.gpus_per_node} GPU(s) a node, and NCCL "
            "cannot share a GPU between ranks; ask for as many GPUs, or set runtime.backend=gloo"
        )
    if where == "slurm":
        check_signal(cluster)
        _check_texts(cluster)
        _extra(cluster)
    return shape


def _check_texts(cluster: Cluster) -> None:
    """What stands in lines of the batch script has to stay in them: behind a line break would be a command.

    Raises:
        ConfigError: a value of the section has characters that no name of the scheduler's has.
    """
    for key, value in cluster.model_dump().items():
        if isinstance(value, str):
            check_line(f"cluster.{key}", value)


def check_line(key: str, text: str) -> None:
    """Raises:
    ConfigError: the text is not one line of printable characters.
    """
    if not text.isprintable() or not text.strip():
        raise ConfigError(f"{key}: got {text[:200]!r}; allowed: one line of printable characters")


def check_signal(cluster: Cluster) -> None:
    """Raises:
    ConfigError: the signal before the time limit would come as soon as the job starts.
    """
    seconds = minutes(cluster.time) * 60
    if cluster.signal_before_s > seconds - _CHECK_S:
        raise ConfigError(
            f"cluster.signal_before_s: got {cluster.signal_before_s} with cluster.time {cluster.time}, so the job "
            f"would be stopped as soon as it starts; allowed: up to {seconds - _CHECK_S}, or give a longer --time"
        )


def check_after(cluster: Cluster, where: str, after: str | None) -> None:
    """Raises:
    ConfigError: there is no queue to wait in, or the section has another dependency.
    """
    if after is not None and where != "slurm":
        raise ConfigError(f"--after: got {after!r}, but --cluster {where} has no queue; allowed: --cluster slurm")
    if after is not None and not re.fullmatch(r"\d+(_\d+)?(:\d+(_\d+)?)*", after):
        raise ConfigError(f"--after: got {after!r}; allowed: the id of a job, such as 1234 or 1234_5")
    if after is not None and "dependency" in _extra(cluster):
        raise ConfigError(f"cluster.extra.dependency: got one, and --after {after} is another; give only one of them")


def _extra(cluster: Cluster) -> dict[str, Any]:
    """Further sbatch options under their names, checked."""
    options = {}
    for key, value in cluster.extra.items():
        name = key.removeprefix("--").replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ConfigError(f"cluster.extra: got {key!r}; allowed: long options of sbatch, such as mail-type")
        if name in _OWN_KEYS:
            raise ConfigError(f"cluster.extra.{key}: has a key of its own; give cluster.{_OWN_KEYS[name]} instead")
        if name in _SILENCING:
            raise ConfigError(f"cluster.extra.{key}: with it sbatch tells no job id in its usual words; leave it out")
        if name in _RESERVED:
            raise ConfigError(f"cluster.extra.{key}: is set by launch.submit itself; leave it out")
        # sbatch takes a backslash out of a value however it is quoted.
        if (
            value is False
            or not isinstance(value, (str, int, float))
            or not str(value).isprintable()
            or "\\" in str(value)
        ):
            raise ConfigError(
                f"cluster.extra.{key}: got {value!r}; allowed: one line of text without a backslash, a number, or true "
                "for an option without a value"
            )
        options[name] = value
    return options


def check_path(key: str, path: Path) -> None:
    """SLURM gives `%` and backslash in names of log files a meaning of its own.

    Raises:
        ConfigError: the path cannot stand in a job script.
    """
    found = [sign for sign in str(path) if sign in "%\\" or ord(sign) < 32 or ord(sign) == 127]
    if found:
        raise ConfigError(f"{key}: got {str(path)!r}; {found[0]!r} cannot stand in the path of a submitted run")


def sbatch_parameters(
    cluster: Cluster, name: str, setup: Sequence[str], after: str | None = None, array: int = 0
) -> dict[str, Any]:
    """What submitit's SlurmExecutor is given; its names, our meaning. `array`: the runs of a job array.

    Raises:
        ConfigError: a text that cannot stand in a line of a batch script.
    """
    shape = layout(cluster)
    _check_texts(cluster)
    check_line("name of the job", name)
    parameters: dict[str, Any] = {
        "job_name": name,
        "time": minutes(cluster.time),
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks_per_node,
        "signal_delay_s": cluster.signal_before_s,
        "stderr_to_stdout": True,  # one log a rank
        "wckey": None,
        "setup": list(setup),
        "additional_parameters": {"requeue": True, **_extra(cluster)},
        # srun does not take over cpus-per-task from sbatch in SLURM 22.05 to 23.02.
        # A site or a user may have sbatch export nothing (SBATCH_EXPORT=NONE); the ranks need what the script sets.
        "srun_args": ["--kill-on-bad-exit=1", "--open-mode=append", "--export=ALL"],
    }
    for key in ("partition", "account", "qos", "constraint", "exclude"):
        if getattr(cluster, key) is not None:
            parameters[key] = getattr(cluster, key)
    if shape.gpus_per_node:
        parameters["gpus_per_node"] = shape.gpus_per_node
    if cluster.cpus_per_rank is not None:
        parameters["cpus_per_task"] = cluster.cpus_per_rank
        parameters["srun_args"].append(f"--cpus-per-task={cluster.cpus_per_rank}")
    if cluster.mem_gb is not None:
        parameters["additional_parameters"]["mem"] = f"{ceil(cluster.mem_gb * 1024)}M"
    if after is not None:
        own = parameters["additional_parameters"].pop("dependency", None)
        parameters["dependency"] = ",".join(filter(None, [own, f"afterany:{after}"]))
    if array:  # without a limit of ours submitit would set one of 256
        parameters["array_parallelism"] = cluster.array_parallelism or array
    return parameters


# sbatch obeys variables of the shell more than the lines of a script: these would undo what the launcher needs, ...
_UNDOING = (
    "REQUEUE",
    "NO_REQUEUE",
    "SIGNAL",
    "OPEN_MODE",
    "ARRAY_INX",
    "WAIT",
    "TIMELIMIT",
    "JOB_NAME",
    "OUTPUT",
    "ERROR",
)
# ... and these what the user has typed. A variable for what is not typed is a site's or a user's default, and stays.
_VARIABLES = {
    "account": ("ACCOUNT",),
    "partition": ("PARTITION",),
    "qos": ("QOS",),
    "constraint": ("CONSTRAINT",),
    "gpus_per_node": ("GPUS_PER_NODE", "GPUS", "GPUS_PER_TASK"),
    "cpus_per_rank": ("CPUS_PER_TASK", "CPUS_PER_GPU"),
    "mem_gb": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
}


def overriding_variables(cluster: Cluster) -> set[str]:
    """Names of the variables from which sbatch would take other settings than those of this section."""
    names = {*_UNDOING, *(name.upper().replace("-", "_") for name in _extra(cluster))}
    for key, variables in _VARIABLES.items():
        if getattr(cluster, key) is not None:
            names |= set(variables)
    return {f"SBATCH_{name}" for name in names}


def python_variables(variables: Mapping[str, str], root: Path) -> dict[str, str]:
    """For processes of ours: this code is found first, and plugins are looked for in the current folder last.

    By itself Python looks there first, and takes a `launch.py` of the user's for ours. Python 3.10 does so in any case.
    """
    paths = [str(root), variables.get("PYTHONPATH")]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def setup_lines(python: str, root: Path, folder: Path) -> list[str]:
    """What the batch script does before srun: a clean environment, and an account of its end by `launch.aftermath`.

    Where Python looks is as in `python_variables`.
    The trap for SIGTERM only notes it: without one, bash would end at once and not see how srun ends.
    """
    account = f'{shlex.quote(python)} -m launch.aftermath "$code" "$ended" {shlex.quote(str(folder))}'
    return [
        f'export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(root))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        f"unset {' '.join(LAUNCHER_VARIABLES)}",
        "ended=0",
        "trap 'ended=1' TERM",
        f'account() {{ code=$?; {account}; exit "$code"; }}',
        "trap account EXIT",
    ]


def sbatch_text(parameters: dict[str, Any], python: str, folder: Path, array: int | None = None) -> str:
    """The file that submitit hands to sbatch; with `array`, for so many runs at once."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{shlex.quote(python)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, map_count=array, **parameters)
