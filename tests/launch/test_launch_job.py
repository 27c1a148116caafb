"""What a task does around the run: the cause of a stop, and what follows from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import attempts, cause, job, overdue, queue
from launch.attempts import CANCELLED, FAILED, FINISHED, GAVE_UP, REQUEUED, STOPPED
from launch.cause import cause_of_sigterm, find_cause
from launch.job import Job, Rules, clean_environment
from launch.record import SubmissionFolder

# As `scontrol show job` of SLURM 22.05 answered inside jobs that had just got SIGTERM.
RUNNING = {"JobState": "RUNNING", "Reason": "None", "Restarts": "0", "RunTime": "00:00:03", "TimeLimit": "00:10:00"}
SCANCEL = {**RUNNING, "JobState": "COMPLETING"}
SCONTROL_REQUEUE = {**SCANCEL, "Restarts": "1", "RunTime": "00:00:00"}
AT_LIMIT = {**SCANCEL, "Reason": "TimeLimit", "RunTime": "00:01:28", "TimeLimit": "00:01:00"}


@pytest.mark.parametrize(
    ("fields", "outcome", "by_scheduler"),
    [
        (SCANCEL, CANCELLED, False),
        (RUNNING, CANCELLED, False),  # scancel --signal=TERM
        (SCONTROL_REQUEUE, REQUEUED, True),
        ({**SCANCEL, "JobState": "PENDING"}, REQUEUED, True),
        (AT_LIMIT, REQUEUED, False),
        ({**SCANCEL, "RunTime": "1-00:00:01", "TimeLimit": "1-00:00:00"}, REQUEUED, False),
        ({**SCANCEL, "JobState": "TIMEOUT"}, REQUEUED, False),
        ({**SCANCEL, "JobState": "PREEMPTED"}, REQUEUED, False),
        ({**RUNNING, "PreemptTime": "2026-11-30T05:20:31"}, REQUEUED, False),
        ({**RUNNING, "PreemptTime": "None"}, CANCELLED, False),
        ({**SCANCEL, "TimeLimit": "UNLIMITED"}, CANCELLED, False),
    ],
)
def test_what_the_scheduler_meant_by_sigterm(fields: dict[str, str], outcome: str, by_scheduler: bool) -> None:
    found = cause_of_sigterm(fields, restarts=0)
    assert (found.outcome, found.by_scheduler) == (outcome, by_scheduler)


def test_a_restart_that_we_know_of_is_no_requeue() -> None:
    assert cause_of_sigterm({**SCANCEL, "Restarts": "2"}, restarts=2).outcome == CANCELLED
    assert cause_of_sigterm({**SCANCEL, "Restarts": "3"}, restarts=2).by_scheduler


@pytest.mark.parametrize(
    ("signal_name", "cancelled", "where", "outcome"),
    [
        ("SIGUSR2", False, "slurm", REQUEUED),
        ("SIGUSR1", False, "slurm", REQUEUED),
        ("SIGUSR2", False, "local", REQUEUED),
        ("SIGUSR2", False, "debug", STOPPED),
        ("SIGUSR2", True, "slurm", CANCELLED),
        ("SIGTERM", True, "slurm", CANCELLED),
        ("SIGTERM", False, "local", STOPPED),
        ("SIGINT", False, "slurm", STOPPED),
    ],
)
def test_what_a_signal_asks_for(signal_name: str, cancelled: bool, where: str, outcome: str) -> None:
    assert find_cause(signal_name, cancelled, where, "7", {}).outcome == outcome


def test_a_rank_that_srun_ends_at_its_start_has_failed_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --kill-on-bad-exit` sends SIGTERM to the others, and the job still runs, for its batch script."""
    fields = dict(RUNNING)
    monkeypatch.setattr(queue, "job_fields", lambda job_id: fields)
    assert find_cause("SIGTERM", False, "slurm", "7", {}, before_meeting=True).outcome == FAILED
    assert find_cause("SIGTERM", False, "slurm", "7", {}).outcome == CANCELLED
    fields |= SCANCEL
    assert find_cause("SIGTERM", False, "slurm", "7", {}, before_meeting=True).outcome == CANCELLED
    fields |= SCONTROL_REQUEUE
    assert find_cause("SIGTERM", False, "slurm", "7", {}, before_meeting=True).by_scheduler


def test_a_scheduler_that_says_nothing_at_first_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, str]] = [{}, AT_LIMIT]
    monkeypatch.setattr(queue, "job_fields", lambda job_id: answers.pop(0))
    monkeypatch.setattr(cause, "_PAUSE_S", 0.0)
    assert find_cause("SIGTERM", False, "slurm", "7", {}).outcome == REQUEUED


def test_without_an_answer_the_job_is_left_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(job_id: str) -> dict[str, str]:
        raise queue.QueueError("slurmctld is down")

    monkeypatch.setattr(queue, "job_fields", silent)
    monkeypatch.setattr(cause, "_PAUSE_S", 0.0)
    found = find_cause("SIGTERM", False, "slurm", "7", {})
    assert found.outcome == STOPPED
    assert found.reason == (
        "stopped by SIGTERM, and SLURM did not say why (slurmctld is down); submit it again to go on"
    )


# ------------------------------------------------------------------------------------------ in a task


class Requeued(BaseException):
    """What submitit's handler does here instead of ending the process."""


class Task:
    """A task of a fake job; `main` is what the run does."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str = "slurm") -> None:
        self.monkeypatch = monkeypatch
        self.files = SubmissionFolder(tmp_path / "run")
        self.where = where
        self.rules = Rules(max_requeues=10, time="1h", signal_before_s=120)
        self.requeues = 0
        self.refusal: Exception | None = None  # of scontrol
        self.leaves_with: int | None = None  # of submitit's handler: an exit code, or None for `Requeued`
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
            monkeypatch.delenv(name)
        self.set("SUBMITIT_EXECUTOR", "slurm")
        self.set("SLURM_JOB_ID", "7")

    def set(self, name: str, value: str) -> None:
        self.monkeypatch.setenv(name, value)

    def saved(self, number: int) -> None:
        (self.files.run_folder / "checkpoints" / f"round-{number:06d}").mkdir(parents=True, exist_ok=True)

    def run(self, main: Callable[[Sequence[str]], int], program: str = "main") -> Any:
        self.monkeypatch.setattr(job, "_program", lambda name: main if name == program else None)
        previous = {number: signal.getsignal(number) for number in job._STOP_SIGNALS}

        def requeue(number: int, frame: object) -> None:
            self.requeues += 1
            if self.refusal is not None:
                raise self.refusal
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit(self.leaves_with or -1)
            raise Requeued

        signal.signal(signal.SIGUSR2, requeue)
        try:
            return Job(self.files.run_folder, ["config.yaml"], self.rules, self.where, program)()
        except SystemExit as leaving:
            return f"exit {leaving.code}"
        except Requeued:
            return "requeued"
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def history(self) -> list[attempts.Attempt]:
        return attempts.read(self.files.attempts, "7")


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    return Task(tmp_path, monkeypatch)


def stopped_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(job, "_last_stop", lambda: name)


def test_a_finished_run_is_accounted_for(task: Task) -> None:
    def main(arguments: Sequence[str]) -> int:
        assert arguments == ["config.yaml"]
        task.saved(4)
        return 0

    assert task.run(main) == 0
    (attempt,) = task.history()
    assert (attempt.start_round, attempt.end_round, attempt.outcome) == (0, 4, FINISHED)
    assert attempt.host == socket.gethostname()


def test_a_stopped_run_goes_back_by_submitits_handler(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")

    def main(arguments: Sequence[str]) -> int:
        task.saved(2)
        return 75

    assert task.run(main) == "requeued"
    assert [(a.end_round, a.outcome) for a in task.history()] == [(2, REQUEUED)]
    assert "launch: stopped by SIGUSR2" in capsys.readouterr().err


def test_signals_that_come_while_the_end_is_settled_are_ignored(task: Task) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")
    original = attempts.add_end

    def hit(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        original(*arguments)

    task.monkeypatch.setattr(attempts, "add_end", hit)
    assert task.run(lambda arguments: 75) == "requeued"


def test_a_signal_before_the_run_takes_over_ends_it_at_once(task: Task) -> None:
    def main(arguments: Sequence[str]) -> int:
        os.kill(os.getpid(), signal.SIGUSR2)
        raise AssertionError("still running")

    assert task.run(main) == "requeued"


# So short that any attempt has had all of its time.
SHORT = Rules(max_requeues=10, time="1m", signal_before_s=10)


def test_a_failure_of_another_rank_at_the_start_is_left_to_the_batch_script(task: Task) -> None:
    task.monkeypatch.setattr(queue, "job_fields", lambda job_id: RUNNING)

    def main(arguments: Sequence[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("still running")

    assert task.run(main) == "exit 1"
    assert [attempt.outcome for attempt in task.history()] == [None]


def test_two_attempts_without_a_round_are_the_last(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")
    task.rules = SHORT
    assert task.run(lambda arguments: 75) == "requeued"
    assert task.run(lambda arguments: 75) == "exit 1"
    assert [attempt.outcome for attempt in task.history()] == [REQUEUED, GAVE_UP]
    assert "attempts 1 and 2 were both ended before one more round was saved" in capsys.readouterr().err


def test_preempted_long_before_its_limit_a_run_may_try_again_but_says_so(
    task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")
    assert [task.run(lambda arguments: 75) for _ in range(2)] == ["requeued", "requeued"]
    assert "requeued; attempts 1 and 2 were both ended before one more round" in task.history()[-1].reason
    capsys.readouterr()
    assert task.run(lambda arguments: 0) == 0
    assert "launch: attempts 1 and 2 were both ended before one more round" in capsys.readouterr().err


def test_attempts_that_were_killed_count_too(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler left them no time to say anything, and started the job again."""
    task.rules = Rules(max_requeues=1, time="1h", signal_before_s=120)
    for restart in range(2):
        attempts.add_start(task.files.attempts, "7", 0, "node1", restart)

    def main(arguments: Sequence[str]) -> int:
        raise AssertionError("started all the same")

    assert task.run(main) == "exit 1"
    assert task.history()[-1].outcome == GAVE_UP
    assert "ended from outside 2 times, and cluster.max_requeues is 1" in capsys.readouterr().err


def test_a_requeue_that_is_refused_says_so(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")
    task.refusal = subprocess.CalledProcessError(1, ["scontrol", "requeue", "7"])
    assert task.run(lambda arguments: 75) == "exit 1"
    assert task.history()[-1].outcome == STOPPED
    assert "requeued, but the requeue failed (Command" in capsys.readouterr().err
    assert task.history()[-1].reason.endswith("submit it again to go on")


def test_the_schedulers_own_requeue_is_left_to_it(task: Task) -> None:
    stopped_by(task.monkeypatch, "SIGTERM")
    task.monkeypatch.setattr(queue, "job_fields", lambda job_id: SCONTROL_REQUEUE)
    assert task.run(lambda arguments: 75) == "exit 0"
    assert task.history()[-1].outcome == REQUEUED


def test_a_cancelled_job_stays_ended(task: Task) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")
    task.files.path.mkdir(parents=True)
    task.files.cancelled.write_text("7\n")
    assert task.run(lambda arguments: 75) == "exit 1"
    assert task.history()[-1].outcome == CANCELLED


def test_an_old_mark_of_another_job_does_not_cancel_this_one(task: Task) -> None:
    stopped_by(task.monkeypatch, "SIGUSR2")
    task.files.path.mkdir(parents=True)
    task.files.cancelled.write_text("6\n")
    assert task.run(lambda arguments: 75) == "requeued"


def test_a_failure_is_left_to_the_batch_script(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    assert task.run(lambda arguments: 1) == "exit 1"
    assert [attempt.outcome for attempt in task.history()] == [None]
    assert "the run ended with exit code 1; the reason stands above and in" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "expected"), [(0, "exit 0"), (75, "exit 0"), (2, "exit 1")])
def test_other_ranks_leave_the_account_alone(task: Task, code: int, expected: str) -> None:
    """Code 0 even when stopped: --kill-on-bad-exit would end rank 0 while it puts the job back."""
    task.set("SLURM_PROCID", "1")
    task.set("SLURM_NTASKS", "2")
    assert task.run(lambda arguments: code) == expected
    assert task.history() == []


def test_places_of_an_array_are_told_apart(task: Task) -> None:
    task.set("SLURM_ARRAY_JOB_ID", "40")
    task.set("SLURM_ARRAY_TASK_ID", "3")
    assert task.run(lambda arguments: 0) == 0
    assert [attempt.job_id for attempt in attempts.read(task.files.attempts, "40_3")] == ["40_3"]


@pytest.mark.parametrize(("code", "outcome", "result"), [(0, FINISHED, 0), (1, GAVE_UP, "exit 1")])
def test_a_health_check_ends_with_its_verdict(task: Task, code: int, outcome: str, result: object) -> None:
    assert task.run(lambda arguments: code, "doctor") == result
    assert task.history()[-1].outcome == outcome


def test_no_launchers_variables_reach_the_run(task: Task) -> None:
    task.set("RANK", "3")
    task.set("MASTER_ADDR", "elsewhere")

    def main(arguments: Sequence[str]) -> int:
        return int("RANK" in os.environ or "MASTER_ADDR" in os.environ)

    assert task.run(main) == 0


def test_a_local_task_forgets_the_slurm_job_that_it_was_started_in() -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_CONF": "/etc/slurm.conf", "WORLD_SIZE": "2", "HOME": "/root"}
    clean_environment(variables, "local")
    assert variables == {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/root"}


def test_a_slurm_task_keeps_what_slurm_says() -> None:
    variables = {"SLURM_PROCID": "0", "WORLD_SIZE": "2"}
    clean_environment(variables, "slurm")
    assert variables == {"SLURM_PROCID": "0"}


def test_a_job_can_be_pickled_by_reference() -> None:
    """The nodes import this module; they do not get a copy of it."""
    import cloudpickle

    content = cloudpickle.dumps(Job(Path("run"), ["config.yaml"], Rules(1, "1h", 120), "slurm"))
    assert len(content) < 1000
    assert b"launch.job" in content


def test_the_exit_code_is_the_programs() -> None:
    from fedspec_dist.processes.runtime import EXIT_STOPPED

    assert job.EXIT_STOPPED == EXIT_STOPPED


def test_a_line_of_json_is_whole(tmp_path: Path) -> None:
    attempts.add_end(tmp_path / "a", "7", 1, REQUEUED, "två\nlines")
    (line,) = (tmp_path / "a").read_text().splitlines()
    assert json.loads(line)["reason"] == "två\nlines"
    assert sys.getsizeof(line) < 500


# ------------------------------------------------------------------------------------------ a run that does not stop


@pytest.fixture
def impatient(task: Task, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(overdue, "_POLL_S", 0.01)
    monkeypatch.setattr(job, "patience", lambda name, before: 0.05)
    return task


def busy(until: Callable[[], object]) -> Callable[[Sequence[str]], int]:
    """A run in the middle of a long client; it ends as a stopped one once `until` holds."""

    def main(arguments: Sequence[str]) -> int:
        deadline = time.monotonic() + 10
        while not until() and time.monotonic() < deadline:
            time.sleep(0.01)
        return 75

    return main


def test_a_run_that_does_not_stop_in_time_is_put_back_meanwhile(impatient: Task) -> None:
    task = impatient
    stopped_by(task.monkeypatch, "SIGUSR2")
    assert task.run(busy(lambda: task.history()[-1].outcome)) == "exit 0"
    (attempt,) = task.history()
    assert attempt.outcome == REQUEUED
    assert "the run did not stop in time" in attempt.reason
    assert task.requeues == 1


def test_a_round_that_is_saved_after_all_counts(impatient: Task) -> None:
    task = impatient
    stopped_by(task.monkeypatch, "SIGUSR2")
    assert task.run(busy(lambda: task.history()[-1].outcome)) == "exit 0"
    task.saved(1)
    assert task.run(busy(lambda: task.history()[-1].outcome)) == "exit 0"
    assert task.history()[0].made_progress


def test_a_cancelled_run_has_all_the_time_that_it_gets(impatient: Task) -> None:
    task = impatient
    stopped_by(task.monkeypatch, "SIGTERM")
    task.monkeypatch.setattr(queue, "job_fields", lambda job_id: SCANCEL)
    started = time.monotonic()
    assert task.run(busy(lambda: time.monotonic() > started + 0.5)) == "exit 1"
    assert [attempt.outcome for attempt in task.history()] == [CANCELLED]
    assert task.requeues == 0


def test_a_requeue_by_the_scheduler_is_noted_meanwhile(impatient: Task) -> None:
    task = impatient
    stopped_by(task.monkeypatch, "SIGTERM")
    task.monkeypatch.setattr(queue, "job_fields", lambda job_id: SCONTROL_REQUEUE)
    assert task.run(busy(lambda: task.history()[-1].outcome)) == "exit 0"
    assert [attempt.outcome for attempt in task.history()] == [REQUEUED]
    assert task.requeues == 0


def test_an_overdue_run_whose_requeue_is_refused_may_still_stop_by_itself(impatient: Task) -> None:
    task = impatient
    stopped_by(task.monkeypatch, "SIGUSR2")
    task.refusal = subprocess.CalledProcessError(1, ["scontrol", "requeue", "7"])
    assert task.run(busy(lambda: task.history()[-1].outcome)) == "exit 1"
    assert task.requeues == 2
    assert task.history()[-1].outcome == STOPPED


def test_a_run_that_can_never_stop_in_time_is_given_up(impatient: Task) -> None:
    task = impatient
    task.rules = SHORT
    stopped_by(task.monkeypatch, "SIGUSR2")
    attempts.add_start(task.files.attempts, "7", 0, "node1", 0)
    attempts.add_end(task.files.attempts, "7", 0, REQUEUED, "")
    codes: list[int] = []
    task.monkeypatch.setattr(os, "_exit", codes.append)
    task.run(busy(lambda: codes))
    assert codes == [1]
    assert task.history()[1].outcome == GAVE_UP


def test_a_local_job_is_started_again_by_its_exit_code(impatient: Task) -> None:
    task = impatient
    task.where = "local"
    task.set("SUBMITIT_EXECUTOR", "local")
    task.set("SUBMITIT_LOCAL_JOB_ID", "7")
    stopped_by(task.monkeypatch, "SIGUSR2")
    task.leaves_with = 144
    codes: list[int] = []
    task.monkeypatch.setattr(os, "_exit", codes.append)
    task.run(busy(lambda: codes))
    assert codes == [144]


def test_patience_depends_on_what_came() -> None:
    assert overdue.patience("SIGTERM", 120) == 3
    assert overdue.patience("SIGUSR2", 120) == 100
    assert overdue.patience("SIGUSR2", 10) == 5


def test_no_signal_no_act() -> None:
    thread = overdue.Overdue(lambda: None, lambda name: pytest.fail("acted"), lambda name: 0.0)
    thread.start()
    time.sleep(0.1)
    assert thread.stop() is False
