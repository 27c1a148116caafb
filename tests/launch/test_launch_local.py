"""`--cluster local` and `--cluster debug` for real: whole jobs of this machine, stopped, killed and cancelled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import attempts, follow, queue
from launch.attempts import CANCELLED, DIVERGED, FINISHED, REQUEUED, RETRIED
from launch.cancel import cancel
from launch.local import local_variables
from launch.record import Record, SubmissionFolder

ROOT = Path(__file__).parents[2]
TINY = ("local.epochs=2", "checkpoint.every=1")


def test_a_local_job_gets_a_clean_environment() -> None:
    variables = {"RANK": "1", "SLURM_JOB_ID": "5", "SUBMITIT_EXECUTOR": "slurm", "PYTHONPATH": "/mine", "HOME": "/root"}
    path = {"PYTHONPATH": "/code:/mine", "PYTHONSAFEPATH": "1"}
    assert local_variables(variables, Path("/code"), None) == {"HOME": "/root", **path}


@pytest.mark.parametrize(
    ("shown", "gpus", "expected"),
    [
        (None, None, None),
        ("2,3", None, "2,3"),
        ("2,3", 0, ""),
        (None, 0, ""),
        (None, 2, "0,1"),
        ("2,3,5", 2, "2,3"),
        ("GPU-ab,GPU-cd", 1, "GPU-ab"),
    ],
)
def test_gpus_are_those_that_the_user_sees(shown: str | None, gpus: int | None, expected: str | None) -> None:
    variables = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert local_variables(variables, Path("/code"), gpus).get("CUDA_VISIBLE_DEVICES") == expected


# ------------------------------------------------------------------------------------------ whole jobs


class Local:
    """Commands in a folder of their own. What is left of a job at the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, module: str, *words: str, code: int = 0, timeout_s: float = 60) -> str:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "7"},  # of some other launcher
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *words: str) -> None:
        self.command("launch.submit", *TINY, "--cluster", "local", *words)

    @property
    def run_folder(self) -> Path:
        (found,) = (self.folder / "runs").iterdir()
        return found

    @property
    def record(self) -> Record:
        record = SubmissionFolder(self.run_folder).record()
        assert record is not None
        return record

    def history(self) -> list[attempts.Attempt]:
        return attempts.read(SubmissionFolder(self.run_folder).attempts, self.record.job_id)

    def tasks(self) -> dict[int, int]:
        """Rank -> process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"submitit.core._submit" in words and self.record.folder.encode() in words:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    (rank,) = (v for v in variables if v.startswith(b"SUBMITIT_LOCAL_GLOBALID="))
                    found[int(rank.split(b"=")[1])] = int(entry.name)
        return found

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come:\n{self.record.log().read_text(errors='replace')}")
            time.sleep(0.05)

    def saved(self) -> int:
        return SubmissionFolder(self.run_folder).rounds_saved()

    def kill_all(self) -> None:
        with contextlib.suppress(ValueError, OSError, AssertionError):  # no job was started
            if queue.local_state(self.record.job_id, self.record.folder, self.record.host).is_alive:
                os.killpg(int(self.record.job_id), signal.SIGKILL)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    job = Local(tmp_path)
    yield job
    job.kill_all()


@pytest.mark.slow
def test_a_stopped_and_then_killed_job_gives_the_bits_of_an_undisturbed_run(local: Local, tmp_path: Path) -> None:
    local.submit("rounds=30", "--ranks-per-node", "2", "cluster.requeue_on_failure=1")
    local.until(lambda: local.saved() >= 2, "round 2")
    os.kill(local.tasks()[1], signal.SIGUSR2)  # not rank 0: the ranks agree
    local.until(lambda: len(local.history()) == 2 and local.saved() >= 5, "round 5 of the second attempt")
    os.kill(local.tasks()[1], signal.SIGKILL)
    assert follow.wait(local.run_folder).finished

    first, second, third = local.history()
    assert (first.outcome, second.outcome, third.outcome) == (REQUEUED, RETRIED, FINISHED)
    assert second.start_round == first.end_round
    assert "SIGUSR2" in first.reason
    assert third.end_round == 30
    assert "Starting again from the last checkpoint (1 of 1 further attempts)" in local.record.log().read_text()

    other = tmp_path / "undisturbed"
    other.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fedspec_dist.main", *TINY, "rounds=30"]
    subprocess.run(command, cwd=other, env=variables, check=True, capture_output=True, timeout=100)
    (folder,) = (other / "runs").iterdir()
    assert (folder / "model.safetensors").read_bytes() == (local.run_folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_cancelled_job_saves_its_rounds_and_leaves_nothing_running(local: Local) -> None:
    local.submit("rounds=500", "--ranks-per-node", "2")
    local.until(lambda: local.saved() >= 1, "round 1")
    assert f"is job {local.record.job_id} already (RUNNING)" in local.command(
        "launch.submit", *TINY, "--cluster", "local", "rounds=500", code=1
    )
    assert "RUNNING" in local.command("launch.status")
    cancel(local.run_folder)
    found = follow.wait(local.run_folder)
    assert found.text.startswith("cancelled after")
    assert [attempt.outcome for attempt in local.history()] == [CANCELLED]
    local.until(lambda: not local.tasks(), "the end of all tasks", 10)
    assert "cancelled" in local.command("launch.status")


@pytest.mark.slow
def test_a_failing_run_says_why_when_followed(local: Local) -> None:
    output = local.command(
        "launch.submit", "data.dataset=npz", "data.path=nowhere.npz", "--cluster", "local", "--follow", code=1
    )
    assert "nowhere.npz" in output
    assert "the job failed with exit code 1" in output
    assert "cluster.requeue_on_failure=N would start it again" in output


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the ranks have met", "in training"])
def test_a_killed_controller_leaves_no_rank_behind(local: Local, when: str) -> None:
    local.submit("rounds=8", "local.epochs=4", "--ranks-per-node", "2")
    if when == "in training":
        local.until(lambda: local.saved() >= 1, "round 1")
    else:
        local.until(lambda: len(local.tasks()) == 2, "the ranks")
    os.kill(int(local.record.job_id), signal.SIGKILL)
    local.until(lambda: not local.tasks(), "the end of all ranks", 5)
    assert "not in the queue" in local.command("launch.status")
    assert "has already ended" in local.command("launch.cancel", str(local.run_folder))
    local.submit("rounds=8", "local.epochs=4", "--ranks-per-node", "2", "--wait")
    assert "finished" in local.command("launch.status")


@pytest.mark.slow
def test_a_job_that_diverges_says_so_and_is_not_started_again(local: Local) -> None:
    words = ("rounds=2", "local.lr=1e30", "--ranks-per-node", "2", "cluster.requeue_on_failure=3", "--wait")
    output = local.command("launch.submit", *TINY, "--cluster", "local", *words, code=3)
    assert "returned a non-finite update in round 1" in output
    assert [attempt.outcome for attempt in local.history()] == [DIVERGED]
    assert "diverged" in local.command("launch.status")
    skipping = (*words, "runtime.on_nonfinite=skip")
    output = local.command("launch.submit", *TINY, "--cluster", "local", *skipping, code=3)
    assert "nobody contributed to any of the 2 rounds" in output
    assert [attempt.outcome for attempt in local.history()] == [DIVERGED]


@pytest.mark.slow
def test_debugging_runs_in_this_process(local: Local) -> None:
    output = local.command("launch.submit", *TINY, "rounds=1", "--cluster", "debug")
    assert "round 1/1" in output
    assert (local.run_folder / "summary.json").exists()
    assert local.command("launch.submit", *TINY, "rounds=1", "--cluster", "debug", "--fresh")
