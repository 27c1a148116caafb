"""The set-up of the cluster tests itself: hosts that are hosts, jobs that fail, lost nodes, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm_cluster
from tests.cluster.slurm_cluster import CHECKOUT, CannotBeHad, Cluster, ClusterError, Settings, slurm_conf

on_slurm = pytest.mark.cluster


def test_the_configuration_names_every_node_and_its_fake_gpus() -> None:
    text = slurm_conf(Path("/x"), Settings(nodes=3, cpus=2, mem_mb=100, gpus=1, job_id=7))
    assert "NodeName=node[1-3] CPUs=2 RealMemory=100 Gres=gpu:1 State" in text
    assert "FirstJobId=7\n" in text
    assert "Gres=" not in slurm_conf(Path("/x"), Settings(gpus=0))


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotBeHad, match="as root only"):
        slurm_cluster.require()


def test_a_machine_without_namespaces_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "unshare").write_text("#!/bin/sh\necho unshare failed: not permitted >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CannotBeHad, match="no namespaces on this machine: unshare failed: not permitted"):
        slurm_cluster.require()


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that lacks SLURM, with an `apt-get` that says no."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm_cluster, "missing", lambda: ["slurmctld"])
    for name, text in (("unshare", "exit 0"), ("apt-get", "echo E: no such package >&2\nexit 100")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(slurm_cluster, "POLICY", policy)
    yield tmp_path
    assert not policy.exists()


def test_a_machine_where_slurm_cannot_be_installed_is_told(without_slurm: Path) -> None:
    with pytest.raises(CannotBeHad, match=r"apt-get could not install slurmctld, .*: E: no such package"):
        slurm_cluster.require()


def test_an_installation_that_hangs_is_given_up(without_slurm: Path) -> None:
    (without_slurm / "apt-get").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(CannotBeHad, match="apt-get install took longer than 1 s"):
        slurm_cluster.require(timeout_s=1)


def test_a_machine_without_apt_is_told(without_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(without_slurm))
    (without_slurm / "apt-get").unlink()
    shutil.copy("/bin/sh", without_slurm / "sh")
    with pytest.raises(CannotBeHad, match="no apt-get to install slurmctld with"):
        slurm_cluster.require()


@on_slurm
def test_the_nodes_are_hosts_with_names_and_addresses_of_their_own(slurm: Cluster) -> None:
    output = slurm.run("srun", "-N2", "sh", "-c", "echo $(hostname) $(ip -o -4 addr show eth0)").stdout
    assert sorted(line.split()[0] for line in output.splitlines()) == ["node1", "node2"]
    assert "10.77.0.11/24" in output
    assert "10.77.0.12/24" in output


@on_slurm
def test_fake_gpus_are_handed_out_and_counted(slurm: Cluster) -> None:
    show = ("sh", "-c", "echo $SLURM_LOCALID:$CUDA_VISIBLE_DEVICES")
    assert sorted(slurm.lines("srun", "-n2", "--gpus-per-node=2", *show)) == ["0:0,1", "1:0,1"]
    assert sorted(slurm.lines("srun", "-n2", "--gpus-per-task=1", *show)) == ["0:0", "1:1"]
    assert slurm.run("srun", "--gpus-per-node=3", "true", check=False).returncode != 0


@on_slurm
def test_a_requeued_job_starts_again_within_seconds(slurm: Cluster, tmp_path: Path) -> None:
    script = "echo start $SLURM_RESTART_COUNT; sleep 60"
    job = slurm.submit("--requeue", "--open-mode=append", "--output=out", "--wrap", script, folder=tmp_path)
    slurm.wait_for(job, "RUNNING")
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(job, "PENDING")
    slurm.wait_for(job, "RUNNING", timeout_s=30)
    deadline = time.monotonic() + 10
    while (tmp_path / "out").read_text().split("\n")[-2] != "start 1" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "start 1" in (tmp_path / "out").read_text()


@on_slurm
def test_a_command_that_hangs_is_ended(slurm: Cluster) -> None:
    with pytest.raises(AssertionError, match="still running after 1 s: srun sleep 60"):
        slurm.run("srun", "sleep", "60", timeout_s=1)


@on_slurm
def test_a_job_that_does_not_get_there_is_shown_and_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit("--wrap", "sleep 60", "--output=out", folder=tmp_path)
    with pytest.raises(AssertionError, match=rf"job {job} is RUNNING, not COMPLETED, after 2 s\n.*JobId={job}"):
        slurm.wait_for(job, "COMPLETED", timeout_s=2)
    assert slurm.wait_for(job, "CANCELLED") == "CANCELLED"


@on_slurm
def test_a_node_dies_and_comes_back(slurm: Cluster) -> None:
    slurm.kill_node("node2")
    assert slurm.processes("node2") == {}
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    assert slurm.states()["node2"].startswith("down")
    slurm.start_node("node2")
    slurm.clear()
    assert slurm.lines("srun", "-w", "node2", "hostname") == ["node2"]


@on_slurm
def test_a_killed_test_run_leaves_no_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = Path(f"/tmp/fs-slurm-killed-{os.getpid()}")
    program = (
        "import sys, time; from pathlib import Path; from tests.cluster.slurm_cluster import Cluster\n"
        "c = Cluster(Path(sys.argv[1])).start(); c.submit('-N2', '--wrap', 'srun sleep 600', folder=Path('/tmp'))\n"
        "print('up', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(root)]
    variables = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            assert _belong_to(root)
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _belong_to(root) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _belong_to(root) == []
    finally:
        Cluster(root).stop()
        shutil.rmtree(root)


def _belong_to(root: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"FEDSPEC_SLURM={root}\0".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


@on_slurm
def test_a_slurm_that_does_not_start_shows_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(f"/tmp/fs-slurm-broken-{os.getpid()}")
    monkeypatch.setattr(slurm_cluster, "slurm_conf", lambda *_: "Nonsense=1\n")
    try:
        with pytest.raises(ClusterError, match=r"(?s)SLURM did not start\n.*Nonsense.*slurmctld: exit 1"):
            Cluster(root).start()
        assert _belong_to(root) == []
    finally:
        shutil.rmtree(root)
