"""Sweeps through the real command line, with real runs: killed, stopped, resumed, tuned."""

from __future__ import annotations

import csv
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.cli import Ended, Job, _descendants, model_of, run

pytestmark = pytest.mark.slow

TINY = "overrides: [rounds=2, local.epochs=1]\n"
LONG = "overrides: [rounds=60, local.epochs=2, checkpoint.every=10]\n"


def sweep(folder: Path, *arguments: str) -> Job:
    return Job([sys.executable, "-m", "launch.sweep", "study.yaml", *arguments], folder, {})


def swept(folder: Path, *arguments: str, timeout_s: float = 120) -> Ended:
    with sweep(folder, *arguments) as job:
        return job.wait(timeout_s)


def models(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("runs/*/model.safetensors")}


def collected(folder: Path) -> list[dict[str, str]]:
    swept(folder, "--collect", "results.csv").expect(0)
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_methods_and_seeds_at_two_ranks_each(tmp_path: Path) -> None:
    text = "seeds: [1, 2]\nmethods: {plain: {overrides: [filter=none]}, wild: {overrides: [local.lr=1e18]}}"
    (tmp_path / "study.yaml").write_text(TINY + text)
    ended = swept(tmp_path, "--ranks", "2", "--max-ranks", "2").expect(0, "4 runs to do, 1 at once")
    assert ended.output.count("finished: plain") == 2
    assert ended.output.count("diverged: wild") == 2, "a result, not a failure"
    rows = collected(tmp_path)
    assert [row["state"] for row in rows] == ["finished", "finished", "diverged", "diverged"]
    assert [row["ranks"] for row in rows] == ["2", "2", "", ""]
    assert all(0 < float(row["final_test_accuracy"]) < 1 for row in rows[:2])
    assert "client" in rows[2]["error"]
    swept(tmp_path, "--status").expect(0, "2 finished", "2 diverged")
    swept(tmp_path).expect(0, "0 runs to do")
    # A run of a sweep is the run that its arguments make.
    (tmp_path / "alone").mkdir()
    run(tmp_path / "alone", "rounds=2", "local.epochs=1", "filter=none", "seed=1").expect(0)
    assert model_of(tmp_path / "alone") in models(tmp_path).values()


@pytest.mark.parametrize(("ranks", "number"), [("1", signal.SIGINT), ("2", signal.SIGTERM), ("2", signal.SIGKILL)])
def test_a_sweep_that_is_ended_goes_on_with_the_same_bits(tmp_path: Path, ranks: str, number: signal.Signals) -> None:
    (tmp_path / "study.yaml").write_text(LONG + "seeds: [1, 2]")
    with sweep(tmp_path, "--ranks", ranks, "--max-ranks", "2") as job:
        job.wait_until(lambda: list(tmp_path.glob("runs/*/checkpoints/round-0000[123]0")), "a checkpoint")
        family = family_of(job.process.pid)
        job.process.send_signal(number)
        ended = job.wait(70)
    assert ended.code == (-9 if number == signal.SIGKILL else 75), ended.output
    wait_until_gone(family)
    assert models(tmp_path) == {} or number != signal.SIGINT
    states = [row["state"] for row in collected(tmp_path)]
    assert "unfinished" in states
    assert "failed" not in states
    swept(tmp_path, "--ranks", "1").expect(0)
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "study.yaml").write_text(LONG + "seeds: [1, 2]")
    swept(tmp_path / "undisturbed").expect(0)
    assert models(tmp_path) == models(tmp_path / "undisturbed")
    resumed = [path.read_text() for path in tmp_path.glob("runs/*/log/console.log")]
    assert any("resuming after round" in text for text in resumed)


def test_a_tuning_runs_to_its_end_and_is_reported(tmp_path: Path) -> None:
    text = "tune: {over: {local.lr: [1.0e-6, 2.0e-6]}, metric: test_loss, expand: true, budget: 4}\nseeds: [1]"
    (tmp_path / "study.yaml").write_text(TINY + text)
    swept(tmp_path).expect(0, "the budget of 4 is spent", "not verified")
    rows = collected(tmp_path)
    assert [row["stage"] for row in rows] == ["tuning"] * 4 + ["result"]
    assert len({row["local.lr"] for row in rows[:4]}) == 4
    assert (tmp_path / "runs" / "study.md").read_text() == (tmp_path / "results.md").read_text()


def test_a_torchrun_that_is_killed_fails_its_run_and_leaves_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(LONG + "seeds: [1]")
    with sweep(tmp_path, "--ranks", "2", "--max-ranks", "2") as job:
        job.wait_until(lambda: list(tmp_path.glob("runs/*/checkpoints/round-*")), "a checkpoint")
        family = family_of(job.process.pid)
        os.kill(family[1], signal.SIGKILL)
        job.wait(90).expect(1, "unfinished: digits-specgrad seed=1", "exit code -9")
    wait_until_gone(family, 5)


def family_of(pid: int) -> list[int]:
    """A process and all that it started, itself first, then its children."""
    return [pid, *_descendants(pid)]


def wait_until_gone(pids: list[int], timeout_s: float = 45) -> None:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if state(pid) not in ("gone", "Z")]:
        assert time.monotonic() < deadline, f"still there: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left]}"
        time.sleep(0.2)
