"""Small runs of the default experiment, what they leave behind, and the same without a cluster to compare with."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.slurm_cluster import CHECKOUT

TINY = ("rounds=2", "local.epochs=1")
NUM_ROUNDS = 12
# Can be stopped on its way, on busy cores and on idle ones: before each client it pauses as long as a file says.
LONG = (
    "plugins=[tests.cluster.unhurried]",
    "local.algorithm=unhurried",
    f"rounds={NUM_ROUNDS}",
    "local.epochs=1",
    "checkpoint.every=1",
)


def pause(folder: Path, seconds: float) -> None:
    """From now on, for the runs that have `folder` as their working folder."""
    (folder / "pause").write_text(str(seconds))


def folder_of(folder: Path) -> Path:
    """The only run folder below `folder`."""
    (found,) = (folder / "runs").iterdir()
    return found


def model_of(folder: Path) -> bytes:
    return (folder_of(folder) / "model.safetensors").read_bytes()


def rounds_of(folder: Path) -> int:
    """Rounds that are written down so far; 0 before there is a run folder."""
    files = list(folder.glob("runs/*/metrics.jsonl"))
    return files[0].read_text().count("\n") if files else 0


def environment_of(folder: Path) -> dict[str, Any]:
    """Of the last start of the run: hosts, the round that it went on after."""
    content = json.loads((folder_of(folder) / "environment.json").read_text())
    last: dict[str, Any] = content["starts"][-1]
    return last


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.1)


@functools.cache
def undisturbed(arguments: tuple[str, ...]) -> bytes:
    """The model of the run of one process, outside the cluster."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedspec_dist.main", *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stdout
        return model_of(Path(folder))
