"""launch.submit on a real SLURM: finished, stopped, requeued, cancelled, killed, powered off."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.cluster.runs import (
    LONG,
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
from tests.cluster.submitted import (
    ENDS,
    attempts_of,
    expect_the_bits_of_an_undisturbed_run,
    launch,
    logs_of,
    outcomes_of,
    submit,
    submit_long,
)

pytestmark = pytest.mark.cluster


def test_a_run_on_two_nodes_is_followed_to_its_end(slurm: Cluster, tmp_path: Path) -> None:
    tmp_path /= """it's a "folder" # of é 数据"""
    tmp_path.mkdir()
    words = ("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-rank", "1", "--mem-gb", "1", "--follow")
    words = ("runtime.device=cpu", *words)  # the GPUs are fakes, and a run that is given some does not do without
    output = launch(slurm, tmp_path, "submit", *TINY, *words, timeout_s=120)
    assert re.search(r"^run folder +/.*/runs/digits-specgrad-", output, re.MULTILINE)
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
    last = submit(slurm, tmp_path, *LONG, "--ranks-per-node", "2")
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, last)


def kill_ranks(slurm: Cluster, node: str) -> None:
    ranks = [pid for pid, command in slurm.processes(node).items() if "submitit.core._submit" in command]
    slurm.run("kill", f"-{signal.SIGKILL}", *map(str, ranks))


def test_a_killed_rank_ends_the_job_at_once(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--nodes", "2")
    kill_ranks(slurm, "node2")
    assert slurm.wait_for(job, *ENDS, timeout_s=30) == "FAILED"
    assert outcomes_of(tmp_path) == ["failed"]
    assert re.search(r"Killed|rank 1|SIGKILL", attempts_of(tmp_path)[-1]["reason"])
    status = launch(slurm, tmp_path, "status")
    assert re.search(r"failed.*(Killed|rank 1|SIGKILL)", status), status


FRAGILE = """
import os, pathlib, socket
if socket.gethostname() == "node2" and not pathlib.Path("failed").exists():
    pathlib.Path("failed").touch()
    os._exit(3)
"""


def test_a_rank_that_fails_at_its_start_is_a_failure_and_no_cancellation(slurm: Cluster, tmp_path: Path) -> None:
    """srun then ends rank 0, which has met nobody yet, by a SIGTERM. And the site has sbatch export nothing."""
    (tmp_path / "fragile.py").write_text(FRAGILE)
    words = ("plugins=[fragile]", "--nodes", "2", "--extra", "export=NONE", "cluster.requeue_on_failure=1")
    job = submit(slurm, tmp_path, *TINY, *words)
    assert slurm.wait_for(job, *ENDS, timeout_s=90) == "COMPLETED", logs_of(tmp_path)
    assert outcomes_of(tmp_path) == ["failed, retried", "finished"]
    assert "task 1: Exited with exit code 3" in attempts_of(tmp_path)[1]["reason"]


def test_a_killed_rank_starts_the_job_again_if_asked(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--nodes", "2", "cluster.requeue_on_failure=1")
    kill_ranks(slurm, "node2")
    until(lambda: outcomes_of(tmp_path), "an account of the failure", timeout_s=30)
    assert outcomes_of(tmp_path) == ["failed, retried"]
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)


def test_a_node_is_lost_and_comes_back(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2", "--exclude", "node1")
    slurm.kill_node("node2")
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    slurm.wait_for(job, "PENDING", timeout_s=30)
    assert re.search(rf"PENDING.*{job}", launch(slurm, tmp_path, "status"))
    slurm.start_node("node2")
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)


def test_one_of_two_nodes_is_lost(slurm: Cluster, tmp_path: Path) -> None:
    """The rank that is left ends within seconds; srun waits for the other one until SLURM misses the node."""
    job = submit_long(slurm, tmp_path, "--nodes", "2")
    slurm.kill_node("node2")
    slurm.wait_for(job, "PENDING", timeout_s=100)  # SlurmdTimeout, and what SLURM takes to look
    slurm.start_node("node2")
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)
    assert "rank 1" in logs_of(tmp_path)


def test_what_can_never_run_is_refused_with_slurms_words(slurm: Cluster, tmp_path: Path) -> None:
    output = launch(slurm, tmp_path, "submit", *TINY, "--nodes", "3", check=False)
    assert "the job was refused" in output
    assert "Node count specification invalid" in output or "More processors requested" in output, output
