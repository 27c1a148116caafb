"""Killed or asked to stop at any moment, and started again at another number of ranks: the same bits in the end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.cli import Job, model_of, results_of, rounds_done, run, run_folder, start

pytestmark = pytest.mark.slow

# About a third of a second a round on one core.
CONFIG = [
    "data.dataset=synthetic",
    "data.shape=[1, 8, 8]",
    "data.num_classes=4",
    "data.num_train=800",
    "data.num_test=100",
    "data.partition.clients=8",
    "model.width=8",
    "clients_per_round=4",
    "local.epochs=3",
    "local.batch_size=10",
    "rounds=8",
    "checkpoint.every=2",
    "server.aggregator=fedgh",
]
# What clients, the weighting and the server's optimizer know from round to round.
REMEMBERING = ["local.algorithm=scaffold", "server.weights=fedawa", "server.optimizer=momentum"]
STOPPED = 75


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, *CONFIG).expect(0)
    return results_of(folder)


Results = tuple[bytes, list[dict[str, Any]]]


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder(folder) / "checkpoints").glob("round-*"))


def _after_round(job: Job, folder: Path, number: int) -> None:
    job.wait_until(lambda: rounds_done(folder) >= number, f"round {number}")


def _finish(folder: Path, expected: Results, ranks: int, methods: Sequence[str] = ()) -> str:
    ended = run(folder, *CONFIG, *methods, ranks=ranks).expect(0)
    assert results_of(folder) == expected, f"other bits after\n{ended.output}"
    return ended.output


@pytest.mark.parametrize("attempt", range(2))
def test_any_rank_killed_at_any_moment(attempt: int, tmp_path: Path, uninterrupted: Results) -> None:
    seed = int(os.environ.get("FEDSPEC_KILL_SEED", time.time_ns() % 100_000)) + attempt
    print(f"FEDSPEC_KILL_SEED={seed}")  # pytest shows it when the test fails
    rng = random.Random(seed)
    ranks, again = rng.choice([(2, 3), (3, 1), (3, 2)])
    with start(tmp_path, *CONFIG, ranks=ranks) as job:
        job.wait_until(lambda: len(job.ranks()) == ranks, "all ranks")
        time.sleep(rng.uniform(0, 6))
        victims = job.ranks()
        if victims:
            os.kill(victims[rng.choice(sorted(victims))], signal.SIGKILL)
        ended = job.wait(30)
        if victims and "run folder" not in ended.output:
            ended.expect_failure()
    _finish(tmp_path, uninterrupted, again)


def test_everything_killed_at_once(tmp_path: Path, uninterrupted: Results) -> None:
    with start(tmp_path, *CONFIG, ranks=2) as job:
        _after_round(job, tmp_path, 3)
    assert "resuming after round 2" in _finish(tmp_path, uninterrupted, 0)


def test_what_is_remembered_outlives_everything_being_killed(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run(whole, *CONFIG, *REMEMBERING, ranks=2).expect(0)
    with start(killed, *CONFIG, *REMEMBERING, ranks=2) as job:
        _after_round(job, killed, 5)
    assert "resuming after round" in _finish(killed, results_of(whole), 3, REMEMBERING)


@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, 2), (signal.SIGINT, 0)], ids=["SIGUSR1", "Ctrl-C"])
def test_a_signal_to_plain_python_is_a_checkpoint_and_exit_code_75(
    number: signal.Signals, again: int, tmp_path: Path, uninterrupted: Results
) -> None:
    with start(tmp_path, *CONFIG) as job:
        _after_round(job, tmp_path, 3)
        job.process.send_signal(number)
        job.wait(15).expect(STOPPED, f"stopped on {number.name} after", "start the same command again to go on")
    done = rounds_done(tmp_path)
    assert _checkpoints(tmp_path)[-1] == f"round-{done:06d}"
    assert f"resuming after round {done}" in _finish(tmp_path, uninterrupted, again)


def test_sigterm_to_torchrun_is_a_checkpoint(tmp_path: Path, uninterrupted: Results) -> None:
    with start(tmp_path, *CONFIG, ranks=2) as job:
        _after_round(job, tmp_path, 3)
        job.process.send_signal(signal.SIGTERM)
        job.wait(30).expect_failure("stopped on SIGTERM after", "start the same command again to go on")
    assert _checkpoints(tmp_path)[-1] == f"round-{rounds_done(tmp_path):06d}"
    _finish(tmp_path, uninterrupted, 3)


def test_ctrl_c_reaches_ranks_from_the_terminal_and_from_torchrun(tmp_path: Path, uninterrupted: Results) -> None:
    with start(tmp_path, *CONFIG, ranks=2) as job:
        _after_round(job, tmp_path, 3)
        os.killpg(job.process.pid, signal.SIGINT)  # the whole foreground group, as a terminal does
        job.wait(30).expect_failure("stopped on SIGINT after")
    assert _checkpoints(tmp_path)[-1] == f"round-{rounds_done(tmp_path):06d}"
    _finish(tmp_path, uninterrupted, 0)


def test_a_signal_to_one_rank_stops_all(tmp_path: Path, uninterrupted: Results) -> None:
    with start(tmp_path, *CONFIG, ranks=3) as job:
        _after_round(job, tmp_path, 3)
        os.kill(job.ranks()[2], signal.SIGTERM)
        ended = job.wait(30).expect_failure("stopped on ", "start the same command again")
        assert "stopped on None" not in ended.output
        assert "exitcode  : 75" in ended.output, ended.output
    assert _checkpoints(tmp_path)[-1] == f"round-{rounds_done(tmp_path):06d}"
    _finish(tmp_path, uninterrupted, 2)


def test_torchrun_restarts_the_job_by_itself(tmp_path: Path, uninterrupted: Results) -> None:
    # --fresh means one fresh start, not one for each restart.
    launcher = ("--standalone", "--max-restarts", "2")
    with start(tmp_path, *CONFIG, "--fresh", ranks=2, launcher=launcher) as job:
        _after_round(job, tmp_path, 3)
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.wait(60).expect(0, "resuming after round")
    assert results_of(tmp_path) == uninterrupted


def test_a_finished_run_says_so_and_fresh_starts_it_over(tmp_path: Path) -> None:
    short = [*CONFIG, "rounds=1"]
    run(tmp_path, *short).expect(0)
    before = (run_folder(tmp_path) / "model.safetensors").stat().st_mtime_ns
    run(tmp_path, *short, ranks=2).expect(0, "this run has already finished; --fresh starts it over")
    assert (run_folder(tmp_path) / "model.safetensors").stat().st_mtime_ns == before
    (run_folder(tmp_path) / "stray").touch()
    model = model_of(tmp_path)
    run(tmp_path, *short, "--fresh").expect(0, "round 1/1")
    assert not (run_folder(tmp_path) / "stray").exists()
    assert model_of(tmp_path) == model


def test_what_a_careless_user_does_to_a_run_folder(tmp_path: Path, uninterrupted: Results) -> None:
    with start(tmp_path, *CONFIG) as job:
        _after_round(job, tmp_path, 5)
    folder = run_folder(tmp_path)
    # Truncate the newest checkpoint, spoil the metrics of a round that will be done again, and one that will not.
    with (folder / "checkpoints" / "round-000004" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe half a li")
    assert "round-000004 passed over: model.safetensors is damaged" in _finish(tmp_path, uninterrupted, 0)

    # No metrics, no summary, but a last checkpoint: says what is lost, and finishes when that is accepted.
    (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").unlink()
    run(tmp_path, *CONFIG).expect(1, "has lost 8 of the 8 rounds before", "--accept-changes")
    run(tmp_path, *CONFIG, "--accept-changes").expect(0, "has lost 8 of the 8 rounds before", "status")
    assert model_of(tmp_path) == uninterrupted[0]

    # No checkpoints at all: starts over, and writes every round once.
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        for file_ in path.iterdir():
            file_.unlink()
    _finish(tmp_path, uninterrupted, 0)
