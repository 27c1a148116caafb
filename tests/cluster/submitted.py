"""Runs handed to SLURM by launch.submit: starting them, their attempts, and what they should end with."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.cluster.runs import (
    LONG,
    NUM_ROUNDS,
    environment_of,
    folder_of,
    model_of,
    pause,
    rounds_of,
    undisturbed,
    until,
)
from tests.cluster.slurm_cluster import Cluster

ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def launch(slurm: Cluster, folder: Path, tool: str, *words: str, check: bool = True, timeout_s: float = 60) -> str:
    command = (sys.executable, "-m", f"launch.{tool}", *words)
    wide = {"COLUMNS": "300"}  # so that no table breaks its lines
    return slurm.run(*command, folder=folder, check=check, timeout_s=timeout_s, variables=wide).stdout


def submit(slurm: Cluster, folder: Path, *words: str) -> str:
    return re.search(r"^job +(\S+)$", launch(slurm, folder, "submit", *words), re.MULTILINE)[1]  # type: ignore[index]


def submit_long(slurm: Cluster, folder: Path, *words: str) -> str:
    """Two ranks, which are at work on their third round when this returns, and will be for a while."""
    pause(folder, 0.5)
    job = submit(slurm, folder, *LONG, *words)
    until(lambda: rounds_of(folder) >= 2, "round 2", timeout_s=90)
    return job


def attempts_of(folder: Path) -> list[dict]:
    path = folder_of(folder) / "submission" / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes_of(folder: Path) -> list[str]:
    return [entry["outcome"] for entry in attempts_of(folder) if entry["event"] == "end"]


def logs_of(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder_of(folder).rglob("*_log.out")))


def expect_the_bits_of_an_undisturbed_run(slurm: Cluster, folder: Path, job: str, timeout_s: float = 90) -> None:
    """Once the job, which has been stopped, ends."""
    pause(folder, 0)
    state = slurm.wait_for(job, *ENDS, timeout_s=timeout_s)
    assert state == "COMPLETED", f"{state}\n{logs_of(folder)}"
    assert 2 <= environment_of(folder)["resumed_after_round"] < NUM_ROUNDS
    assert model_of(folder) == undisturbed(LONG)
