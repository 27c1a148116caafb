"""What is said and done when a job ends: logs read, failures counted, outcomes told."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedspec_dist.rounds.divergence import NonFiniteUpdateError
from fedspec_dist.runs.events import Events
from launch import aftermath, attempts, cancel, follow, queue, status
from launch.attempts import CANCELLED, DIVERGED, FAILED, FINISHED, GAVE_UP, REQUEUED, RETRIED, STOPPED
from launch.logs import Tail, last_error, srun_errors, tail
from launch.queue import GONE, UNKNOWN, QueueError, QueueState
from launch.record import Record, SubmissionFolder, run_of, write, write_runs

# As the log of rank 0 looked when rank 1 had been killed: srun writes there too.
KILLED_LOG = """\
submitit INFO (2026-11-30 05:31:35,100) - Starting with JobEnvironment(job_id=7, hostname=node1, local_rank=0(2))
round  12/120  accuracy 0.1000
srun: error: node1: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: node1: task 0: Exited with exit code 1
"""


class Run:
    """A submitted run with files of our own making."""

    def __init__(self, tmp_path: Path, cluster: str = "slurm", retries: int = 0) -> None:
        self.path = tmp_path / "runs" / "digits-0123"
        self.files = SubmissionFolder(self.path)
        self.folder = self.files.jobs / "one"
        write(self.files.config, f"rounds: 120\ncluster: {{requeue_on_failure: {retries}}}\n")
        write_runs(self.folder, [self.path])
        self.record = Record("7", cluster, str(self.folder), 2, 1, "1h", socket.gethostname(), time.time())
        self.files.write_record(self.record)

    def started(self, round_number: int = 0, restart: int = 0) -> Run:
        attempts.add_start(self.files.attempts, "7", round_number, "node1", restart)
        return self

    def ended(self, outcome: str, round_number: int = 0, reason: str = "") -> Run:
        attempts.add_end(self.files.attempts, "7", round_number, outcome, reason)
        return self

    def told(self, error: Exception) -> Run:
        Events(self.path / "events.jsonl", "7.0", 1, "node2", "7").failure(error)
        return self

    def log(self, text: str, rank: int = 0) -> Run:
        write(self.record.log(rank), text)
        return self

    def settle(self, code: int, ended: bool = False, restart: int = 0) -> tuple[str, bool]:
        return aftermath.settle(self.files, self.folder, "7", code, ended, restart)

    def finish(self) -> Run:
        write(self.path / "summary.json", '{"status": "finished"}')
        return self


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# ------------------------------------------------------------------------------------------ after srun


def test_a_killed_task_is_explained(run: Run) -> None:
    run.started().log(KILLED_LOG)
    assert run.settle(137) == (
        "the job failed with exit code 137 (SIGKILL); node1: task 1: Killed; node1: task 0: Exited with exit code 1; a "
        "task was killed from outside: if nobody did, it was out of memory (--mem-gb). Not started again; "
        "cluster.requeue_on_failure=N would start it again",
        False,
    )
    assert attempts.read(run.files.attempts, "7")[-1].outcome == FAILED


def test_an_exception_is_explained_by_the_runs_own_events(run: Run) -> None:
    run.started().log("srun: error: node1: task 0: Exited with exit code 1\n")
    run.told(ValueError("no data at /data"))
    text, again = run.settle(1)
    assert text.startswith("the job failed with exit code 1; node1: task 0: Exited with exit code 1; no data at /data.")
    assert not again


@pytest.mark.parametrize("rank_0_starts", [True, False], ids=["started", "before rank 0 could say that it starts"])
def test_failures_are_tried_again_as_often_as_allowed(tmp_path: Path, rank_0_starts: bool) -> None:
    run = Run(tmp_path, retries=2)
    texts = []
    for restart in range(3):
        if rank_0_starts:
            run.started(restart=restart)
        text, again = run.settle(1, restart=restart)
        texts.append((text.split(". ")[1], again))
    assert texts == [
        ("Starting again from the last checkpoint (1 of 2 further attempts)", True),
        ("Starting again from the last checkpoint (2 of 2 further attempts)", True),
        ("Not started again", False),
    ]
    assert [a.outcome for a in attempts.read(run.files.attempts, "7")] == [RETRIED, RETRIED, FAILED]


@pytest.mark.parametrize("code", [138, 140, -10, -12])
def test_a_signal_to_stop_that_comes_before_the_run_can_take_it_is_a_requeue(tmp_path: Path, code: int) -> None:
    run = Run(tmp_path)
    write(run.files.config, "rounds: 120\ncluster: {requeue_on_failure: 0, max_requeues: 1}\n")
    assert run.settle(code, restart=0) == ("stopped by a signal before the run could take it: requeued", True)
    text, again = run.settle(code, restart=1)
    assert text.startswith("the job was ended from outside 2 times, and cluster.max_requeues is 1")
    assert not again
    assert [a.outcome for a in attempts.read(run.files.attempts, "7")] == [REQUEUED, GAVE_UP]


@pytest.mark.parametrize("outcome", [FINISHED, REQUEUED, CANCELLED, STOPPED, GAVE_UP])
def test_what_rank_0_has_settled_stays_settled(tmp_path: Path, outcome: str) -> None:
    run = Run(tmp_path, retries=5).started().ended(outcome)
    assert run.settle(255) == ("", False)


def test_a_failure_after_a_requeue_is_a_new_one(tmp_path: Path) -> None:
    run = Run(tmp_path, retries=1).started().ended(REQUEUED).started(restart=1)
    assert run.settle(1, restart=1)[1]


def test_a_failure_after_a_requeue_counts_even_if_rank_0_never_started(tmp_path: Path) -> None:
    run = Run(tmp_path, retries=1).started().ended(REQUEUED)
    assert run.settle(127, restart=1)[1]
    text, again = run.settle(127, restart=2)
    assert text.startswith("the job failed with exit code 127")
    assert not again
    assert [a.outcome for a in attempts.read(run.files.attempts, "7")] == [REQUEUED, RETRIED, FAILED]


@pytest.mark.parametrize(("code", "ended"), [(0, False), (143, True), (137, True)])
def test_success_and_the_schedulers_own_end_are_no_failures(tmp_path: Path, code: int, ended: bool) -> None:
    assert Run(tmp_path, retries=5).started().settle(code, ended) == ("", False)


def test_a_cancelled_job_is_not_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, retries=5).started()
    write(run.files.cancelled, "7\n")
    assert run.settle(137) == ("", False)


def test_the_batch_scripts_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, retries=1)
    attempts.add_start(run.files.attempts, "40_0", 3, "node1", 0)
    requeued: list[str] = []
    monkeypatch.setattr(queue, "requeue", requeued.append)
    variables = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "0"}
    assert aftermath.main(["1", "0", str(run.folder)], variables) == 0
    assert requeued == ["40_0"]
    assert "launch: the job failed with exit code 1. Starting again" in capsys.readouterr().err

    def refuse(job_id: str) -> None:
        raise QueueError("Requested operation is presently disabled")

    monkeypatch.setattr(queue, "requeue", refuse)
    attempts.add_start(run.files.attempts, "7", 3, "node1", 0)
    assert aftermath.main(["1", "0", str(run.folder)], {"SLURM_JOB_ID": "7"}) == 1
    assert "SLURM did not requeue the job: Requested operation is presently disabled" in capsys.readouterr().err
    (attempt,) = attempts.read(run.files.attempts, "7")
    assert attempt.outcome == FAILED
    assert attempt.reason.endswith(
        "did not requeue the job: Requested operation is presently disabled; submit it again to go on"
    )


def test_each_place_of_an_array_finds_its_run(tmp_path: Path) -> None:
    write_runs(tmp_path, [Path("/runs/a"), Path("/runs/b c")])
    assert run_of(tmp_path, 1) == Path("/runs/b c")


# ------------------------------------------------------------------------------------------ logs


def test_srun_is_heard_about_the_last_start_only(run: Run) -> None:
    again = "submitit INFO (2026) - Starting with JobEnvironment(...)\nsrun: error: node2: task 0: Killed\n"
    run.log(KILLED_LOG + again)
    assert srun_errors(run.record.log()) == ["node2: task 0: Killed"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("config error: rounds: got 0; must be above 0\n", "rounds: got 0; must be above 0"),
        ("[rank 1] error: rank 1 on node1: no GPU\nfine\n", "rank 1 on node1: no GPU"),
        ("Traceback (most recent call last):\nx.y.OddError: No x\n", "x.y.OddError: No x"),
        ("slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED\n", "*** JOB 7 ON node1 CANCELLED"),
        ("round 1/2\n", ""),
    ],
)
def test_the_last_error_of_a_log(run: Run, text: str, expected: str) -> None:
    run.log(text, rank=1)
    assert last_error(run.record.logs()) == expected


def test_how_the_ranks_that_were_left_ended_is_no_cause(run: Run) -> None:
    run.log("Traceback (most recent call last):\nKeyboardInterrupt\n").log("OSError: no such device\n", rank=1)
    assert last_error(run.record.logs()) == "OSError: no such device"


def test_what_an_earlier_attempt_died_of_is_not_repeated(run: Run) -> None:
    run.told(OSError("disk full"))
    run.log("OSError: disk full\nsubmitit INFO (2026) - Starting with JobEnvironment(...)\nround 1/2\n")
    assert last_error(run.record.logs()) == ""
    time.sleep(0.01)
    run.started()
    assert run.settle(1)[0].startswith("the job failed with exit code 1. Not started again")


def test_a_run_that_diverged_is_not_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, retries=5).started().told(NonFiniteUpdateError("client 3 is not finite", 2))
    text, again = run.settle(1)
    assert text.startswith("the run diverged: client 3 is not finite. Not started again")
    assert not again
    assert attempts.read(run.files.attempts, "7")[-1].outcome == DIVERGED
    assert run.settle(1) == ("", False), "accounted for once"


def test_the_end_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\nlast \xff\n")
    assert tail(path)[-1] == "last \N{REPLACEMENT CHARACTER}"
    assert sum(map(len, tail(path))) < 70_000
    assert tail(tmp_path / "none") == []


def test_a_growing_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = Tail(path)
    assert reader.read() == ""
    path.write_bytes("one\ntwö".encode()[:-1])  # half a character
    assert reader.read() == "one\n"
    path.write_bytes("one\ntwö\nthree".encode())
    assert reader.read() == "twö\n"
    assert reader.close() == "three"
    path.write_bytes(b"new\n")  # emptied and begun again
    assert reader.read() == "new\n"


# ------------------------------------------------------------------------------------------ outcomes


@pytest.mark.parametrize(
    ("outcome", "state", "expected"),
    [
        (FAILED, "FAILED", "failed after 4 rounds: because"),
        (GAVE_UP, GONE, "gave up after 4 rounds: because"),
        (CANCELLED, "CANCELLED", "cancelled after 4 rounds: because"),
        (REQUEUED, "TIMEOUT", "ended by SLURM: TIMEOUT (limit)"),
        (REQUEUED, GONE, None),
        (RETRIED, "COMPLETED", None),
    ],
)
def test_how_a_job_ended(run: Run, outcome: str, state: str, expected: str | None) -> None:
    run.started().ended(outcome, 4, "because")
    reason = "limit" if state == "TIMEOUT" else ""
    found = follow.outcome(run.files, run.record, QueueState(state, reason))
    assert (found.text if found else None) == expected
    assert found is None or not found.finished


def test_a_finished_run_and_a_healthy_machine(run: Run) -> None:
    run.started().ended(FINISHED)
    assert follow.outcome(run.files, run.record, QueueState(GONE)) == follow.Outcome(True, "finished")
    run.finish()
    assert follow.outcome(run.files, run.record, QueueState("FAILED")) == follow.Outcome(True, "finished")


def states(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    left = list(names)
    monkeypatch.setattr(follow, "queue_state", lambda record: QueueState(left.pop(0) if len(left) > 1 else left[0]))


def test_waiting_shows_the_log_and_the_queue(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    states(monkeypatch, "PENDING", "PENDING", "RUNNING", "COMPLETED")
    run.started().ended(FINISHED).finish().log("round 1/2\nround 2/2")
    shown: list[str] = []
    assert follow.wait(run.path, shown.append, poll_s=0.01).finished
    assert "".join(shown) == "job 7: PENDING\nround 1/2\njob 7: RUNNING\njob 7: COMPLETED\nround 2/2"


def test_a_finished_run_is_not_waited_for_where_the_queue_cannot_be_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    states(monkeypatch, UNKNOWN)
    run.finish()
    assert follow.wait(run.path, poll_s=0.01) == follow.Outcome(True, "finished")


def test_between_two_attempts_a_job_has_not_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    states(monkeypatch, "RUNNING", "COMPLETED", "PENDING", "RUNNING", GONE)
    run.started().ended(REQUEUED)
    found = follow.wait(run.path, poll_s=0.01, settle_s=0.3)
    assert found.text == "ended without an account of it"


def test_the_patience_begins_anew_with_each_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    running = ["RUNNING"] * 40  # longer than the patience
    states(monkeypatch, "COMPLETED", *running, "COMPLETED", "PENDING", GONE)
    left = follow.queue_state

    def state(record: Record) -> QueueState:
        found = left(record)
        if found.name == GONE:
            run.finish()
        return found

    monkeypatch.setattr(follow, "queue_state", state)
    run.started().ended(REQUEUED)
    assert follow.wait(run.path, poll_s=0.01, settle_s=0.2).finished


def test_an_end_without_account_shows_the_last_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    states(monkeypatch, GONE)
    run.log("ImportError: no launch\n")
    found = follow.wait(run.path, poll_s=0.01, settle_s=0.05)
    assert found == follow.Outcome(False, "ended without an account of it", ": ImportError: no launch")


def test_ctrl_c_ends_the_waiting_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(record: Record) -> QueueState:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "queue_state", interrupt)
    assert follow.follow_and_report(run.path, follow=True) == 130
    assert f"the job goes on. python -m launch.cancel {run.path} ends it" in capsys.readouterr().err


def test_only_submitted_runs_can_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow.main([str(tmp_path)]) == 2
    assert "was not submitted by launch.submit, so there is no job to wait for" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ status


def shown(run: Run, monkeypatch: pytest.MonkeyPatch, state: QueueState) -> status.Row:
    monkeypatch.setattr(queue, "slurm_states", lambda jobs: dict.fromkeys(jobs, state))
    (row,) = status.rows([run.path])
    return row


def metrics(run: Run, *lines: str) -> None:
    write(run.path / "metrics.jsonl", "".join(f"{line}\n" for line in lines))


def test_a_running_run_in_the_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started()
    metrics(
        run,
        '{"round": 1, "test_accuracy": 0.5, "seconds_round": 2.0}',
        '{"round": 2, "test_accuracy": null, "seconds_round": 4.0}',
        '{"rou',
    )
    row = shown(run, monkeypatch, QueueState("RUNNING", "", "0:41", "9:19"))
    assert row == status.Row("digits-0123", "RUNNING", "7", "2/120", "0.5000", "0:41", "about 5:54, limit 9:19", "")


def test_a_branch_counts_on_and_a_metric_has_its_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started()
    events = Events(run.path / "events.jsonl", "one start", 0, "host")
    events.write("started", headline=["test_mse", "min"])
    events.write("branched", round=100)
    metrics(run, '{"round": 101, "test_mse": 0.5, "seconds_round": 2.0}')
    row = shown(run, monkeypatch, QueueState("RUNNING", "", "0:41", "9:19"))
    assert (row.rounds, row.metric, row.left) == ("101/220", "0.5000", "about 3:58, limit 9:19")
    assert shown(run, monkeypatch, QueueState("COMPLETED")).elapsed == "0:02"
    other = status.Row("b", "finished", "", "2/2", "0.9000", "", "", "")
    for rows, title in (([row], "mse"), ([other], "accuracy"), ([row, other], "metric")):
        assert [column.header for column in status.table(rows).columns][4] == title


def test_a_waiting_run_says_for_what(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = shown(run, monkeypatch, QueueState("PENDING", "Resources", "0:00", "1:00:00"))
    assert (row.state, row.rounds, row.left, row.error) == ("PENDING (Resources)", "0/120", "", "")


def test_a_failed_run_says_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started().ended(FAILED, 4, "no memory")
    row = shown(run, monkeypatch, QueueState(GONE))
    assert (row.state, row.error) == ("failed", "no memory")


def test_an_error_in_brackets_is_no_markup_and_a_long_one_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started().ended(FAILED, 4, "[/pair.cc:545] closed " + "x" * 1000)
    row = shown(run, monkeypatch, QueueState(GONE))
    assert len(row.error) < 250
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(status.table([row]))
    assert "[/pair.cc:545] closed" in console.export_text()


def test_a_run_that_died_silently_shows_its_last_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started().log("OSError: disk full\n")
    row = shown(run, monkeypatch, QueueState(GONE))
    assert (row.state, row.error) == ("not in the queue", "OSError: disk full")


def test_a_finished_run_hides_old_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started().ended(RETRIED, 0, "bad luck").finish()
    row = shown(run, monkeypatch, QueueState("COMPLETED"))
    assert (row.state, row.error) == ("finished", "")


def test_a_finished_run_whose_job_is_about_to_end_has_no_time_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started().finish()
    metrics(run, '{"round": 120, "test_accuracy": 0.5, "seconds_round": 2.0}')
    row = shown(run, monkeypatch, QueueState("COMPLETING", "", "4:11", "9:19"))
    assert (row.state, row.elapsed, row.left) == ("finished", "4:00", "")


def test_a_run_that_gets_nowhere_says_so_until_it_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for restart in range(3):
        run.started(2, restart)
    running = QueueState("RUNNING", "", "0:41", "9:19")
    checkpoint = run.path / "checkpoints" / "round-000002"
    checkpoint.mkdir(parents=True)
    assert shown(run, monkeypatch, running).error.startswith("attempts 1 and 2 were both ended before one more round")
    checkpoint.rename(checkpoint.with_name("round-000003"))
    assert shown(run, monkeypatch, running).error == ""


def test_a_table_that_goes_to_a_file_has_a_line_a_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(queue, "slurm_states", lambda jobs: dict.fromkeys(jobs, QueueState("TIMEOUT")))
    run.started()
    metrics(run, '{"round": 2, "test_accuracy": 0.5, "seconds_round": 2.0}')
    assert status.main([str(run.path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "digits-0123" in line]
    assert "ended by SLURM: TIMEOUT" in line
    assert "2/120" in line


def test_runs_without_a_job_are_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "by-torchrun"
    write(path / "config.yaml", "rounds: 9\n")
    monkeypatch.setattr(queue, "_squeue", lambda jobs: pytest.fail("nothing to ask for"))
    (row,) = status.rows([path])
    assert (row.state, row.job_id, row.rounds) == ("not started", "", "0/9")


def test_the_status_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    assert status.main([]) == 1
    assert "no runs in runs/" in capsys.readouterr().err
    Run(tmp_path).finish()
    write(tmp_path / "runs" / ".arrays" / "x", "")
    monkeypatch.setattr(queue, "slurm_states", lambda jobs: {})
    assert status.main([]) == 0
    output = capsys.readouterr().out
    assert "digits-0123" in output
    assert "arrays" not in output
    assert status.main(["runs"]) == 0, "a folder of runs, by its name"
    assert "digits-0123" in capsys.readouterr().out
    assert status.main(["nowhere", "runs/digits-0123"]) == 1
    assert "nowhere: is no run folder, and none is in it; a run's has a config.yaml" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ cancel


def test_the_mark_is_there_before_the_signal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job would take it for a preemption and go back into the queue."""
    marked: list[bool] = []
    monkeypatch.setattr(cancel, "queue_state", lambda record: QueueState("RUNNING"))
    monkeypatch.setattr(queue, "job_fields", lambda job_id: {"StdOut": f"{run.folder}/7_0_log.out"})
    monkeypatch.setattr(queue, "run_command", lambda words: marked.append(run.files.is_cancelled("7")))
    assert cancel.cancel(run.path) == f"{run.path}: job 7 cancelled"
    assert marked == [True]


def test_a_refused_scancel_leaves_no_mark(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(words: list[str]) -> str:
        raise QueueError("Access/permission denied")

    monkeypatch.setattr(cancel, "queue_state", lambda record: QueueState("RUNNING"))
    monkeypatch.setattr(queue, "run_command", refuse)
    assert cancel.main([str(run.path)]) == 1
    assert "Access/permission denied" in capsys.readouterr().err
    assert not run.files.is_cancelled("7")


def test_what_has_ended_or_never_began_is_not_cancelled(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cancel, "queue_state", lambda record: QueueState(GONE))
    assert cancel.cancel(run.path) == f"{run.path}: job 7 has already ended"
    with pytest.raises(ValueError, match=r"was not submitted by launch.submit; allowed: run folders with a submission"):
        cancel.cancel(tmp_path)


def test_a_local_job_of_another_host_is_cancelled_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "local")
    run.files.write_record(Record("7", "local", str(run.folder), 1, 1, "1h", "elsewhere", 0.0))
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("a process of this host was signalled"))
    with pytest.raises(QueueError, match="the job was started on elsewhere; cancel it there"):
        cancel.cancel(run.path)
    assert not run.files.is_cancelled("7")


def test_a_job_of_slurm_that_is_not_of_this_run_is_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "queue_state", lambda record: QueueState("RUNNING"))
    monkeypatch.setattr(queue, "job_fields", lambda job_id: {"StdOut": "/home/me/my-other-job.out"})
    monkeypatch.setattr(queue, "run_command", lambda words: pytest.fail(f"{words}"))
    with pytest.raises(QueueError, match=r"job 7 is not of this run: its log is /home/me/my-other-job.out"):
        cancel.cancel(run.path)
    assert not run.files.is_cancelled("7")


@pytest.mark.parametrize("folder", ["", "/", "/tmp", "MINE/submission", "MINE/submission/jobs/one/deeper"])
def test_a_process_that_is_not_the_controller_of_this_run_is_left_alone(tmp_path: Path, folder: str) -> None:
    """job.json may lie where others can write: with an empty folder it named any process of the machine."""
    run = Run(tmp_path, "local")
    with subprocess.Popen([sys.executable, "-c", "input()", "launch.local", ""], stdin=subprocess.PIPE) as bystander:
        record = Record(
            str(bystander.pid), "local", folder.replace("MINE", str(run.path)), 1, 1, "1h", socket.gethostname(), 0.0
        )
        run.files.write_record(record)
        with pytest.raises(ValueError, match="is of another run's job, which is left alone"):
            cancel.cancel(run.path)
        run.files.write_record(replace(record, folder=str(run.folder)))
        assert "has already ended" in cancel.cancel(run.path)
        assert bystander.poll() is None
        bystander.communicate(b"\n")
        assert bystander.returncode == 0


def test_a_signal_is_named_in_both_notations() -> None:
    assert aftermath._signal_of(137) == aftermath._signal_of(-signal.SIGKILL) == " (SIGKILL)"
    assert aftermath._signal_of(1) == aftermath._signal_of(255) == ""


# ------------------------------------------------------------------------------------------ runs without a job


def test_runs_that_were_started_by_hand_say_what_became_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_squeue", lambda jobs: pytest.fail("nothing to ask for"))
    told: dict[str, list[Exception | str]] = {
        "failed": [ValueError("no data at /data")],
        "diverged": [NonFiniteUpdateError("client 3 is not finite", 2)],
        "stopped": ["stopped"],
        "killed": [],
    }
    for name, ends in told.items():
        writer = Events(tmp_path / name / "events.jsonl", name, 0, "here")
        writer.write("started")
        for end in ends:
            writer.write(end) if isinstance(end, str) else writer.failure(end)
    assert all(status.is_run(tmp_path / name) for name in told), "also one that failed before its config was written"
    found = status.rows([tmp_path / name for name in told])
    assert [row.state for row in found] == list(told)
    assert [row.error for row in found] == ["no data at /data", "client 3 is not finite", "", ""]
    with (tmp_path / "killed" / ".lock").open("w") as lock:
        lock.write(f"process 12 on {os.uname().nodename}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status.rows([tmp_path / "killed"])[0].state == "running"
    (tmp_path / "killed" / ".lock").write_text("process 12 on elsewhere\n")
    assert status.rows([tmp_path / "killed"])[0].state == "started on elsewhere", "whose locks nobody sees here"


def test_a_job_that_diverged_is_shown_with_its_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.started()
    write(run.path / "summary.json", '{"status": "diverged", "reason": "the final model is not finite"}')
    row = shown(run, monkeypatch, QueueState("FAILED"))
    assert (row.state, row.error) == ("diverged", "the final model is not finite")
    monkeypatch.setattr(follow, "queue_state", lambda record: QueueState("FAILED"))
    assert follow.follow_and_report(run.path, follow=False) == 3
