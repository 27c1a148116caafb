"""What is kept of attempts, and when no further one may follow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch import attempts
from launch.attempts import FAILED, FINISHED, GAVE_UP, REQUEUED, RETRIED, Attempt

HOUR = 3600.0


def attempt(number: int, start: int, end: int | None, outcome: str | None = REQUEUED, lasted: float = HOUR) -> Attempt:
    return Attempt("7", number, start, 0.0, number - 1, "node1", end, lasted, outcome)


def reason(*history: Attempt, max_requeues: int = 10) -> str:
    return attempts.reason_to_give_up(history, max_requeues, HOUR)


def test_starts_and_ends_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "submission" / "attempts.jsonl"
    attempts.add_start(path, "7", 0, "node1", 0)
    attempts.add_end(path, "7", 4, REQUEUED, "SIGUSR2")
    attempts.add_start(path, "7", 4, "node2", 1)
    attempts.add_end(path, "7", 9, FINISHED, "")
    first, second = attempts.read(path, "7")
    assert (first.number, first.start_round, first.end_round, first.outcome) == (1, 0, 4, REQUEUED)
    assert (second.number, second.start_round, second.end_round, second.host) == (2, 4, 9, "node2")
    assert first.reason == "SIGUSR2"
    assert (first.restart, second.restart) == (0, 1)
    assert 0 < first.started <= (first.ended or 0) <= second.started


def test_restarts_are_counted_by_slurm_or_by_the_local_controller() -> None:
    assert attempts.restart_of({}) == 0
    assert attempts.restart_of({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == 2
    assert attempts.restart_of({attempts.LOCAL_RESTARTS: "3"}) == 3
    assert attempts.restart_of({"SLURM_JOB_ID": "7", attempts.LOCAL_RESTARTS: "3"}) == 0  # submitted by a local job


def test_a_killed_attempt_ended_where_the_next_one_began(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    attempts.add_start(path, "7", 0, "node1", 0)
    attempts.add_start(path, "7", 3, "node1", 1)
    first, second = attempts.read(path, "7")
    assert (first.end_round, first.outcome, first.made_progress, first.was_interrupted) == (3, None, True, True)
    assert (second.end_round, second.outcome) == (None, None)


def test_other_jobs_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    attempts.add_start(path, "6", 0, "node1", 0)
    attempts.add_start(path, "7", 0, "node1", 0)
    with path.open("ab") as file:
        file.write(b'{"event": "end", "job_id": "7", "rou\xff\n[1]\n')
    assert [entry.job_id for entry in attempts.read(path, "7")] == ["7"]
    assert attempts.read(tmp_path / "none", "7") == []


def test_one_attempt_without_a_round_may_be_bad_luck() -> None:
    assert reason(attempt(1, 0, 0)) == ""
    assert reason(attempt(1, 0, 2), attempt(2, 2, 2)) == ""
    assert reason(attempt(1, 0, 0), attempt(2, 0, 1)) == ""


STUCK = (
    "attempts 2 and 3 were both ended before one more round was saved (both at round 2): give more time (--time), "
    "checkpoint more often (checkpoint.every), or make rounds smaller (clients_per_round, local.epochs)"
)


def test_two_in_a_row_without_a_round_in_all_of_their_time_are_enough() -> None:
    history = [attempt(1, 0, 2), attempt(2, 2, 2), attempt(3, 2, 2, lasted=HOUR - 10)]
    assert attempts.stuck(history) == STUCK
    assert reason(*history) == f"{STUCK}. Both had all of their time, so a further one would do no better"


@pytest.mark.parametrize("second", [attempt(3, 2, 2, lasted=100.0), attempt(3, 2, 2, outcome=None, lasted=0)])
def test_after_a_preemption_the_next_one_may_be_luckier_but_it_is_said(second: Attempt) -> None:
    history = [attempt(1, 0, 2), attempt(2, 2, 2), second]
    assert attempts.stuck(history) == STUCK
    assert reason(*history) == ""


def test_a_failure_between_or_after_them_says_something_else() -> None:
    assert attempts.stuck([attempt(1, 0, 0), attempt(2, 0, 0), attempt(3, 0, 0, FAILED)]) == ""


def test_failures_are_counted_elsewhere() -> None:
    assert reason(attempt(1, 0, 0, RETRIED), attempt(2, 0, 0, RETRIED)) == ""
    assert reason(attempt(1, 0, 0), attempt(2, 0, 0), attempt(3, 0, 0, FAILED)) == ""


def test_the_number_of_requeues_is_bounded() -> None:
    history = [attempt(number, number, number + 1) for number in range(1, 4)]
    assert reason(*history, max_requeues=3) == ""
    assert reason(*history, max_requeues=2).startswith(
        "the job was ended from outside 3 times, and cluster.max_requeues is 2. Submit it again"
    )
    assert reason(attempt(1, 0, 5), max_requeues=0) != ""
    unlucky = [attempt(1, 0, 2), attempt(2, 2, 2, lasted=9), attempt(3, 2, 2, lasted=9)]
    assert reason(*unlucky, max_requeues=2).endswith(f"cluster.max_requeues; {STUCK}")


def test_what_would_be_if_the_last_one_ended_now() -> None:
    (ended,) = attempts.with_end([attempt(1, 0, None, None)], 4, REQUEUED)
    assert (ended.end_round, ended.outcome) == (4, REQUEUED)
    assert time.time() - 10 < (ended.ended or 0) <= time.time()
    assert attempts.with_end([], 0, GAVE_UP) == []
