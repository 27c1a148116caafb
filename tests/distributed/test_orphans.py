"""Ranks end with the launcher that started them; whatever else starts a process may leave it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedspec_dist.processes.orphans import identity, kill
from tests.end_to_end.cli import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")

RANK = """
import os, sys, time
from fedspec_dist.processes.orphans import end_with_launcher, say_interrupted
wait = sys.argv[2:] and float(sys.argv[2])
time.sleep(wait or 0)
say_interrupted()
end_with_launcher()
print(os.getpid(), file=open(sys.argv[1] + ".tmp", "w"))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(60)
"""
# Starts a rank as torchrun does (the variable is the rank's alone), says who it is, and stays.
LAUNCHER = """
import os, subprocess, sys, time
mark, *command = sys.argv[1:]
print(subprocess.Popen(command, env=os.environ | ({mark: "1"} if mark else {})).pid, flush=True)
time.sleep(60)
"""
MARKS = ["TORCHELASTIC_RUN_ID", "SUBMITIT_LOCAL_GLOBALID"]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _eventually(condition: Callable[[], object], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """Starts launcher and rank; the launcher, and the process that it started."""
    started: list[int] = []

    def start(mark: str, *rank: str, wait: bool = True) -> tuple[subprocess.Popen[bytes], int]:
        environment = {name: value for name, value in os.environ.items() if name not in MARKS}
        command = [sys.executable, "-c", LAUNCHER, mark, *(rank or (sys.executable, "-c", RANK, "ready"))]
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        started.extend([process.pid, child := int(process.stdout.readline())])
        if wait:
            assert _eventually((tmp_path / "ready").exists)
            started.append(int((tmp_path / "ready").read_text()))
        return process, child

    yield start
    for pid in started:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mark", MARKS)
def test_a_rank_ends_with_its_launcher(mark: str, launch, tmp_path: Path) -> None:
    launcher, rank = launch(mark)
    assert _alive(rank)
    launcher.kill()
    launcher.wait()
    assert _eventually(lambda: not _alive(rank), 3)


def test_a_rank_behind_a_script_ends_with_its_launcher(launch, tmp_path: Path) -> None:
    (tmp_path / "rank.sh").write_text(f"{sys.executable} -c '{RANK}' ready\ntrue\n")
    launcher, shell = launch(MARKS[0], "sh", "rank.sh")
    rank = int((tmp_path / "ready").read_text())
    assert rank != shell
    launcher.kill()
    launcher.wait()
    assert _eventually(lambda: not _alive(rank), 3)


def test_a_rank_whose_launcher_has_ended_before_its_first_line_ends_there(launch, tmp_path: Path) -> None:
    launcher, rank = launch(MARKS[0], sys.executable, "-c", RANK, "ready", "1.0", wait=False)
    launcher.kill()
    launcher.wait()
    assert _eventually(lambda: not _alive(rank), 5)
    assert not (tmp_path / "ready").exists()


def test_a_process_without_a_launcher_outlives_who_started_it(launch, tmp_path: Path) -> None:
    """By nohup, setsid or a script that ends."""
    starter, rank = launch("")
    starter.kill()
    starter.wait()
    time.sleep(0.5)
    assert _alive(rank)


def test_ctrl_c_is_a_sentence_and_130(launch, tmp_path: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, "ready"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    assert _eventually((tmp_path / "ready").exists)
    rank.send_signal(signal.SIGINT)
    assert rank.communicate()[1] == b"interrupted\n"
    assert rank.returncode == 130


def test_a_process_is_killed_by_a_name_that_only_it_has() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = identity(process.pid)
        assert name
        assert name != identity(os.getpid())
        boot, space, pid, started = name.rsplit(" ", 3)
        for other in (f"other {space} {pid} {started}", f"{boot} other {pid} {started}", f"{boot} {space} {pid} 7", ""):
            assert not kill(other)
        assert process.poll() is None
        assert kill(name)
        assert process.wait(5) == -signal.SIGKILL
        assert not kill(name)


@pytest.mark.parametrize("mark", MARKS)
def test_a_rank_in_a_container_of_its_own_runs(mark: str, tmp_path: Path) -> None:
    """There the launcher cannot be seen, which is no sign that it has ended."""
    enclosed = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*enclosed, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may make no namespace of processes")
    command = [*enclosed, sys.executable, "-c", RANK, "ready"]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, mark: "1", "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    ) as process:
        assert _eventually((tmp_path / "ready").exists)
        process.kill()
