"""What the scheduler says, with programs of our own in place of SLURM's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import queue
from launch.queue import (
    CONTROLLER,
    GONE,
    UNKNOWN,
    QueueError,
    QueueState,
    local_state,
    parse_sacct,
    parse_squeue,
    slurm_states,
)


class Programs:
    """Shell scripts that stand first in PATH; each notes its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "$@" >> "{self.folder}/{name}.calls"\n{script}\n')
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    return Programs(folder)


def test_lines_of_squeue() -> None:
    found = parse_squeue("12|RUNNING|None|0:41|9:19\n13_4|PENDING|Resources|0:00|1:00:00\nodd line\n")
    assert found == {
        "12": QueueState("RUNNING", "", "0:41", "9:19"),
        "13_4": QueueState("PENDING", "Resources", "0:00", "1:00:00"),
    }


def test_lines_of_sacct() -> None:
    assert parse_sacct("12|CANCELLED by 0\n13_1|COMPLETED\n14|\n") == {
        "12": QueueState("CANCELLED"),
        "13_1": QueueState("COMPLETED"),
    }


@pytest.mark.parametrize(
    "name", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", UNKNOWN, "NEW_IN_SLURM_30"]
)
def test_a_state_that_may_go_on_is_alive(name: str) -> None:
    assert QueueState(name).is_alive


@pytest.mark.parametrize("name", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", GONE])
def test_a_state_without_return_is_not(name: str) -> None:
    assert not QueueState(name).is_alive


def test_all_jobs_are_asked_for_at_once(programs: Programs) -> None:
    programs.add("squeue", 'echo "1|RUNNING|None|0:01|0:59"')
    programs.add("sacct", 'echo "2|FAILED"')
    found = slurm_states(["1", "2", "3", "1"])
    assert [found[job].name for job in ("1", "2", "3")] == ["RUNNING", "FAILED", GONE]
    (call,) = programs.calls("squeue")
    assert "--jobs=1,2,3" in call
    assert "--array" in call
    assert "--jobs=2,3" in programs.calls("sacct")[0]
    assert slurm_states([]) == {}


def test_what_the_shell_would_have_shown_hides_no_jobs(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.add("squeue", 'echo "1|PENDING|${SQUEUE_PARTITION-all}|0:01|0:59"')
    monkeypatch.setenv("SQUEUE_PARTITION", "low")
    assert slurm_states(["1"])["1"].reason == "all"


def test_without_accounting_a_forgotten_job_is_gone(programs: Programs) -> None:
    programs.add("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    programs.add("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert slurm_states(["1"]) == {"1": QueueState(GONE)}


def test_a_scheduler_that_does_not_answer_has_lost_nothing(programs: Programs) -> None:
    programs.add("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    found = slurm_states(["1"])["1"]
    assert found == QueueState(UNKNOWN, "Unable to contact slurm controller")
    assert found.is_alive


def test_a_slow_scheduler_is_not_waited_for_for_ever(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.add("squeue", "exec sleep 20")
    monkeypatch.setattr(queue, "_TIMEOUT_S", 0.3)
    assert slurm_states(["1"])["1"].reason == "squeue did not answer within 0 s"


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QueueError, match="there is no scontrol on this machine: is it a login node"):
        queue.requeue("1")


def test_the_fields_of_a_job(programs: Programs) -> None:
    programs.add("scontrol", 'echo "JobId=12 JobName=a b JobState=RUNNING Reason=None Restarts=2 TimeLimit=1-00:00:00"')
    found = queue.job_fields("12")
    assert (found["JobState"], found["Restarts"], found["TimeLimit"]) == ("RUNNING", "2", "1-00:00:00")
    assert programs.calls("scontrol") == ["show job --oneliner 12"]
    programs.add("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert queue.job_fields("12") == {}
    programs.add("scontrol", "exit 3")
    with pytest.raises(QueueError, match="scontrol ended with 3"):
        queue.job_fields("12")


def test_a_local_job_is_a_process_with_its_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", CONTROLLER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        job, host = str(process.pid), socket.gethostname()
        assert local_state(job, str(tmp_path), host).name == "RUNNING"
        assert local_state(job, "another folder", host).name == GONE  # the id is another process's now
        assert local_state(job, "", host).name == GONE  # which is a word of any command line
        assert local_state(job, CONTROLLER, host).name == GONE
        assert local_state("self", str(tmp_path), host).name == GONE
        assert local_state(job, str(tmp_path), "elsewhere") == QueueState(UNKNOWN, "started on elsewhere")
        process.kill()
    assert local_state(job, str(tmp_path), host).name == GONE
    assert not os.path.exists(f"/proc/{job}")
