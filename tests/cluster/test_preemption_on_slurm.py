"""Preempted runs: with a signal before, with SIGTERM alone, without time, cancelled, and without progress."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.runs import pause, until
from tests.cluster.slurm_cluster import Cluster, Settings
from tests.cluster.submitted import (
    ENDS,
    attempts_of,
    expect_the_bits_of_an_undisturbed_run,
    launch,
    outcomes_of,
    submit_long,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def second_cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """As SLURM is without further settings: a preempted job gets SIGTERM, whatever signal it has asked for."""
    with (
        tempfile.TemporaryDirectory(prefix="fs-slurm-", dir="/tmp") as folder,
        Cluster(Path(folder), Settings(signal_before_preemption=False, job_id=2 * 10**7)) as cluster,
    ):
        yield cluster.start()


@pytest.fixture
def sigterm_only(second_cluster: Cluster) -> Iterator[Cluster]:
    yield second_cluster
    second_cluster.clear()


def starts_of(folder: Path) -> int:
    return [entry["event"] for entry in attempts_of(folder)].count("start")


def take_the_place(slurm: Cluster, folder: Path) -> None:
    """With a job of higher priority, for some seconds, on all nodes."""
    other = slurm.submit("-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 8", folder=folder)
    slurm.wait_for(other, "RUNNING")


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


@pytest.mark.parametrize("partition", ["low", "abrupt", "revoked"])
def test_sigterm_alone(sigterm_only: Cluster, tmp_path: Path, partition: str) -> None:
    """Left time and requeued by SLURM, not left any, or cancelled unless the job requeues itself."""
    slurm = sigterm_only
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2", "--partition", partition, "--extra", "nodelist=node1")
    take_the_place(slurm, tmp_path)
    expect_the_bits_of_an_undisturbed_run(slurm, tmp_path, job)
    assert starts_of(tmp_path) == 2
    assert outcomes_of(tmp_path)[-1] == "finished"


def test_a_run_that_never_gets_a_round_done_says_so_and_ends(slurm: Cluster, tmp_path: Path) -> None:
    job = submit_long(slurm, tmp_path, "--ranks-per-node", "2", "cluster.max_requeues=2")
    pause(tmp_path, 60)  # from now on no client comes to its end
    for attempt in (1, 2, 3):
        until(lambda: starts_of(tmp_path) == attempt, f"attempt {attempt}", timeout_s=40)  # noqa: B023 - at once
        slurm.wait_for(job, "RUNNING")
        slurm.run("scontrol", "requeue", job)
    assert slurm.wait_for(job, *ENDS, timeout_s=60) == "FAILED"
    status = launch(slurm, tmp_path, "status")
    assert re.search(r"gave up.*the job was ended from outside 3 times", status)
    assert "attempts 2 and 3 were both ended before one more round was saved" in attempts_of(tmp_path)[-1]["reason"]
