"""launch.submit on a real SLURM: finished, stopped, requeued, preempted, cancelled, killed, powered off."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.runs import (
    LONG,
    NUM_ROUNDS,
    TINY,
    environment_of,
    folder_of,
    model_of,
    pause,
    rounds_of,
    undisturbed,
    until,
)
from tests.cluster.slurm_cluster import Cluster

pytestmark = pytest.mark.cluster
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


def test_a_run_on_two_nodes_is_followed_to_its_end(slurm: Cluster, tmp_path: Path) -> None:
    words = ("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-rank", "1", "--mem-gb", "1", "--follow")
    output = launch(slurm, tmp_path, "submit", *TINY, *words, timeout_s=120)
    assert re.search(r"^run folder +\S+/runs/digits-specgrad-", output, re.MULTILINE)
    assert "final_test_accuracy" in output  # rank 0's log
    assert "finished" in output.splitlines()[-1]
    assert environment_of(tmp_path)["ranks"] == ["node1 cpu", "node2 cpu"]
    assert outcomes_of(tmp_path) == ["finished"]
    assert model_of(tmp_path) == undisturbed(TINY)
    assert "already finished" in launch(slurm, tmp_path, "submit", *TINY)
    assert re.search(r"finished .* 2/2 ", launch(slurm, tmp_path, "status"))


def test_scontrol_requeue(slurm: Cluster, tmp_path: Path) -> None:
    """SLURM sends SIGTERM alone, and starts the job again by itself."""
    job = submit_long(slurm, tmp_path, "--nodes", "2")
    slurm.run("scontrol", "requeue", job)
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)
    assert [entry["event"] for entry in attempts_of(tmp_path)].count("start") == 2


def test_a_preempted_run_goes_on_behind_the_one_that_took_its_place(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2", "--partition", "low", "--extra", "nodelist=node1")
    before = time.monotonic()
    other = slurm.submit("-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 8", folder=tmp_path)
    slurm.wait_for(other, "RUNNING")
    assert time.monotonic() - before < 20, "the preempted run did not leave of its own, but was ended after GraceTime"
    assert outcomes_of(tmp_path) == ["requeued"]
    # The queue is full now.
    assert re.search(rf"PENDING \(\w+\).*{job}", launch(slurm, tmp_path, "status"))
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)
    assert outcomes_of(tmp_path) == ["requeued", "finished"]


def test_the_time_limit(slurm: Cluster, tmp_path: Path) -> None:
    """The limit is drawn near once the run is under way; SLURM looks at limits each 30 s."""
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2", "cluster.signal_before_s=50")
    pause(tmp_path, 1.5)
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=1")
    until(lambda: outcomes_of(tmp_path), "the signal before the limit", timeout_s=60)
    assert outcomes_of(tmp_path) == ["requeued"]
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=10")
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)


def test_a_cancelled_run_stays_cancelled_and_can_be_submitted_again(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2")
    slurm.run("scancel", job)
    assert slurm.wait_for(job, *ENDS, timeout_s=30) == "CANCELLED"
    assert re.search(rf"cancelled.*{job}", launch(slurm, tmp_path, "status"))
    done = rounds_of(tmp_path)
    again = submit(slurm, tmp_path, *LONG, "--ranks-per-node", "2")
    until(lambda: rounds_of(tmp_path) > done, "another round", timeout_s=90)
    assert environment_of(tmp_path)["resumed_after_round"] >= 2
    refused = launch(slurm, tmp_path, "submit", *LONG, check=False)
    assert f"is job {again} already (RUNNING)" in refused
    assert "cancelled" in launch(slurm, tmp_path, "cancel", str(folder_of(tmp_path)))
    assert slurm.wait_for(again, *ENDS, timeout_s=30) == "CANCELLED"
    assert re.search(rf"cancelled.*{again}", launch(slurm, tmp_path, "status"))
    assert attempts_of(tmp_path)[-1]["outcome"] == "cancelled"


def test_a_killed_rank_ends_the_job_at_once_and_it_starts_again_if_asked(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--nodes", "2", "cluster.requeue_on_failure=1")

    def kill() -> None:
        ranks = [pid for pid, command in slurm.processes("node2").items() if "submitit.core._submit" in command]
        slurm.run("kill", f"-{signal.SIGKILL}", *map(str, ranks))

    kill()
    until(lambda: outcomes_of(tmp_path), "an account of the failure", timeout_s=30)
    assert outcomes_of(tmp_path) == ["failed, retried"]
    assert re.search(r"Killed|rank 1|SIGKILL", attempts_of(tmp_path)[-1]["reason"])
    resumed_at = rounds_of(tmp_path)
    until(lambda: rounds_of(tmp_path) > resumed_at, "another round", timeout_s=60)
    kill()
    assert slurm.wait_for(job, *ENDS, timeout_s=30) == "FAILED"
    assert outcomes_of(tmp_path) == ["failed, retried", "failed"]
    status = launch(slurm, tmp_path, "status")
    assert re.search(r"failed.*(Killed|rank 1|SIGKILL)", status), status


def test_a_node_is_lost_and_comes_back(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2", "--exclude", "node1")
    slurm.kill_node("node2")
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    slurm.wait_for(job, "PENDING", timeout_s=30)
    assert re.search(rf"PENDING.*{job}", launch(slurm, tmp_path, "status"))
    slurm.start_node("node2")
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)


def test_what_can_never_run_is_refused_with_slurms_words(slurm: Cluster, tmp_path: Path) -> None:
    output = launch(slurm, tmp_path, "submit", *TINY, "--nodes", "3", check=False)
    assert "the job was refused" in output
    assert "Node count specification invalid" in output or "More processors requested" in output, output
