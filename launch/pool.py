"""Runs as processes of this host, so many ranks at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedspec_dist.processes.orphans import die_with_parent
from launch.axes import Run
from launch.cluster import LAUNCHER_VARIABLES, ROOT, python_variables
from launch.outcomes import CONSOLE

# A run that is told to stop finishes the client it trains and writes a checkpoint; torchrun gives its ranks 30 s.
GRACE_S = 60.0
_KILL_S = 10.0
# By this variable the processes of a run are known, whoever their parent is by then.
_TOKEN = "FEDSPEC_DIST_SWEEP_RUN"

# Of a task of SLURM in which the sweep itself may have been started; a run must not take them for its own.
_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS")
_TASK_PREFIXES = ("TORCHELASTIC_", "SLURM_STEP_", "SUBMITIT_LOCAL_")


def command(run: Run, ranks: int) -> list[str]:
    """Plain python for one rank; else torchrun, which picks a free port."""
    program = ["-m", "fedspec_dist.main", *run.arguments]
    if ranks == 1:
        return [sys.executable, *program]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, *launcher, *program]


def environment(outer: Mapping[str, str], threads: int, gpus: Sequence[str] | None) -> dict[str, str]:
    """The variables of a run: no other job's ranks, so many threads, these GPUs (None: as outside)."""
    inner = {
        name: value
        for name, value in outer.items()
        if name not in (*LAUNCHER_VARIABLES, *_TASK) and not name.startswith(_TASK_PREFIXES)
    }
    inner |= python_variables(inner, ROOT)
    inner.setdefault("OMP_NUM_THREADS", str(threads))
    if gpus is not None:
        inner["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return inner


def visible_gpus(outer: Mapping[str, str]) -> list[str]:
    """The GPUs that runs may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if (given := outer.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(number) for number in range(count)]


def least_used(gpus: Sequence[str], used: Sequence[str], count: int) -> list[str]:
    """As many different GPUs as a run has ranks, at most all; those with the fewest runs first."""
    return sorted(gpus, key=lambda gpu: used.count(gpu))[:count]


@dataclass
class _Process:
    run: Run
    handle: subprocess.Popen[bytes]
    gpus: list[str]
    token: str


class Pool:
    """Runs at work. Each is the leader of a process group of its own, and is told to stop when this process dies."""

    def __init__(self, max_ranks: int, ranks: int, gpus: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        self.slots = max_ranks // ranks  # runs at once
        self._ranks = ranks
        self._gpus = list(gpus)
        self._options = options  # of each run's command
        self._working: list[_Process] = []

    @property
    def working(self) -> list[Run]:
        return [process.run for process in self._working]

    def has_room(self) -> bool:
        return len(self._working) < self.slots

    def start(self, run: Run) -> None:
        """Start or resume; what it prints is appended to `log/console.log` of its folder."""
        used = [gpu for process in self._working for gpu in process.gpus]
        on_gpus = self._gpus and run.config.runtime.device != "cpu"
        gpus = least_used(self._gpus, used, self._ranks) if on_gpus else []
        threads, token = run.config.runtime.threads_per_rank, uuid.uuid4().hex
        path = run.folder / CONSOLE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as console:
            handle = subprocess.Popen(
                [*command(run, self._ranks), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**environment(os.environ, threads, gpus if on_gpus else None), _TOKEN: token},
                start_new_session=True,  # a Ctrl-C at the terminal is for the sweep, which passes it on in its way
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        self._working.append(_Process(run, handle, gpus, token))

    def ended(self) -> list[tuple[Run, int]]:
        """Those that ended since the last call, with their exit codes."""
        over = [process for process in self._working if process.handle.poll() is not None]
        for process in over:
            _kill_all(process.token)  # a torchrun that was killed leaves its ranks
        self._working = [process for process in self._working if process not in over]
        return [(process.run, int(process.handle.returncode)) for process in over]

    def ask_to_stop(self) -> None:
        """Each run writes a checkpoint and ends; torchrun tells its ranks."""
        for process in self._working:
            with contextlib.suppress(ProcessLookupError):
                process.handle.terminate()

    def wait(self, seconds: float) -> bool:
        """Whether all have ended within that time."""
        deadline = time.monotonic() + seconds
        while self._working and time.monotonic() < deadline:
            self.ended()
            time.sleep(0.1)
        return not self._working

    def kill(self) -> None:
        """At once, with torchrun's ranks."""
        for process in self._working:
            process.handle.kill()
            _kill_all(process.token)
            process.handle.wait()
        self._working = []


def _kill_all(token: str) -> None:
    """Every process that was started with this token, sessions of their own included; waits until they are gone."""
    deadline = time.monotonic() + _KILL_S
    killed: set[int] = set()
    while time.monotonic() < deadline:
        for pid in (left := _members(token)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        if not left and not any(map(_holds_files, killed)):
            return
        time.sleep(0.02)


def _holds_files(pid: int) -> bool:
    """Whether a process that was killed may still have its lock: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _members(token: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_TOKEN}={token}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
