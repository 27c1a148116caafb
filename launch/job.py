"""What runs in every task of a submitted job: the run itself, and afterwards whether the job goes back into the queue.

A task is a rank. submitit unpickles a `Job` in each and calls it; the ranks find each other in `fedspec_dist`. Rank 0
keeps the account of attempts. When the run was stopped by a signal it decides whether another attempt may follow, and
requeues by submitit's own handler (its log lines, its pickle, `scontrol requeue`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from submitit.core.job_environment import JobEnvironment
from submitit.helpers import Checkpointable, DelayedSubmission

from fedspec_dist.config import minutes
from launch import attempts
from launch.cause import Decision, find_cause
from launch.cluster import LAUNCHER_VARIABLES
from launch.overdue import Overdue, patience
from launch.record import SubmissionFolder

# Of fedspec_dist.main: stopped by a signal, with a checkpoint; or with numbers that are not finite.
EXIT_STOPPED, EXIT_DIVERGED = 75, 3
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Rules:
    """What of the config decides about further attempts."""

    max_requeues: int
    time: str
    signal_before_s: int

    @property
    def seconds(self) -> float:
        """What an attempt has until it is told of its time limit."""
        return minutes(self.time) * 60.0 - self.signal_before_s


class Job(Checkpointable):
    """One run, as a rank of it sees it: `arguments` are those of `fedspec_dist.main`, the config file first."""

    def __init__(
        self,
        run_folder: Path,
        arguments: Sequence[str],
        rules: Rules,
        where: str,
        program: str = "main",
    ) -> None:
        self.run_folder = run_folder
        self.arguments = list(arguments)
        self.rules = rules
        self.where = where
        self.program = program

    def checkpoint(self) -> DelayedSubmission:
        """For submitit: the same once more, since the run finds its own checkpoint."""
        return DelayedSubmission(self)

    def __call__(self) -> int:
        clean_environment(os.environ, self.where)
        logging.getLogger("submitit").propagate = False  # it has a handler of its own
        task = JobEnvironment()
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's
        account = _Account(SubmissionFolder(self.run_folder), task.job_id, self.rules)
        if task.global_rank == 0:
            try:
                account.start()
            except OSError as error:
                _leave(f"no account of this attempt can be written: {error}")
        if self.program == "doctor":
            return self._examine(account, task.global_rank)
        overdue = Overdue(_last_stop, lambda name: self._when_overdue(account, name, requeue), self._patience)
        if task.global_rank == 0 and self.where != "debug":
            overdue.start()
        code, stopped_by, early = _run(_program("main"), self.arguments)
        if overdue.stop():
            sys.exit(0)  # the scheduler is ending the job
        if task.global_rank:
            # Other ranks leave quietly: with --kill-on-bad-exit any other code would end rank 0 amid its account.
            if code in (0, EXIT_STOPPED, EXIT_DIVERGED):
                sys.exit(0)
            _leave(f"rank {task.global_rank} on {task.hostname} ended with exit code {code}")
        if code == 0:
            account.end(attempts.FINISHED, "")
            return 0
        if code == EXIT_STOPPED:
            self._after_stop(account, stopped_by, early, requeue)
        if code == EXIT_DIVERGED:
            account.end(attempts.DIVERGED, account.said())
            sys.exit(EXIT_DIVERGED)
        # A failure is accounted for by the batch script, which also sees what this process cannot survive.
        _leave(f"the run ended with exit code {code}; the reason stands above and in {self.run_folder}/log")

    def _after_stop(self, account: _Account, stopped_by: str | None, early: bool, requeue: Any) -> NoReturn:
        decision = account.decide(stopped_by, self.where, early)
        if decision.outcome == attempts.FAILED:
            _leave(decision.reason)
        account.end(decision.outcome, decision.reason)
        print(f"launch: {decision.reason}", file=sys.stderr, flush=True)
        if decision.outcome != attempts.REQUEUED:
            sys.exit(1)
        if not decision.by_scheduler:
            _requeue(account, requeue, decision.reason)
        sys.exit(0)

    def _when_overdue(self, account: _Account, stopped_by: str, requeue: Any) -> bool:
        """In another thread, while the run is still at it: what of the above cannot wait. False if all of it can."""
        decision = account.decide(stopped_by, self.where)
        if decision.outcome in (attempts.CANCELLED, attempts.STOPPED):
            return False
        reason = f"{decision.reason} (the run did not stop in time; it is still at a client)"
        account.end(decision.outcome, reason)
        print(f"launch: {reason}", file=sys.stderr, flush=True)
        if decision.outcome == attempts.GAVE_UP:
            os._exit(1)
        if not decision.by_scheduler:
            try:
                _requeue(account, requeue, reason)
            except SystemExit as leaving:
                if leaving.code == 1:  # refused; the run is asked again once it has stopped, if it still can
                    return False
                if self.where == "local":  # its controller waits for this code
                    os._exit(int(leaving.code or 0))
        return True  # the run may still save its round before SLURM ends it

    def _patience(self, signal_name: str) -> float:
        return patience(signal_name, self.rules.signal_before_s)

    def _examine(self, account: _Account, rank: int) -> int:
        healthy = _program("doctor")(self.arguments) == 0
        if rank == 0 and healthy:
            account.end(attempts.FINISHED, "")
        elif rank == 0:
            account.end(attempts.GAVE_UP, "the doctor found something to mend: its last lines say what comes first")
            sys.exit(1)
        return 0


def _requeue(account: _Account, requeue: Any, reason: str) -> NoReturn:
    """By submitit's handler, which ends this thread with a code of its own; with 1 when it is refused."""
    try:
        requeue(signal.SIGUSR2, None)
    except Exception as error:
        refused = f"{reason}, but the requeue failed ({error}); submit it again to go on"
        account.end(attempts.STOPPED, refused)
        _leave(refused)
    raise AssertionError("submitit's handler returned")


class _Account:
    """attempts.jsonl of this job, written by rank 0."""

    def __init__(self, files: SubmissionFolder, job_id: str, rules: Rules) -> None:
        self._files = files
        self._job_id = job_id
        self._rules = rules

    def start(self) -> None:
        """Leave at once when the earlier attempts, killed without time to decide, show that this one is useless."""
        path, restart = self._files.attempts, attempts.restart_of(os.environ)
        attempts.add_start(path, self._job_id, self._files.rounds_saved(), socket.gethostname(), restart)
        before = attempts.read(path, self._job_id)[:-1]
        if before and (reason := self._reason_to_give_up(before)):
            self.end(attempts.GAVE_UP, reason)
            _leave(reason)
        if said := attempts.stuck(before):
            print(f"launch: {said}", file=sys.stderr, flush=True)

    def said(self) -> str:
        """How the run itself says that it ended."""
        end = self._files.last_end()
        return end.message if end is not None else self._files.diverged()

    def end(self, outcome: str, reason: str) -> None:
        attempts.add_end(self._files.attempts, self._job_id, self._files.rounds_saved(), outcome, reason)

    def decide(self, stopped_by: str | None, where: str, early: bool = False) -> Decision:
        cancelled = self._files.is_cancelled(self._job_id)
        cause = find_cause(stopped_by, cancelled, where, self._job_id, os.environ, before_meeting=early)
        if cause.outcome != attempts.REQUEUED or cause.by_scheduler:
            return cause
        ended = attempts.with_end(
            attempts.read(self._files.attempts, self._job_id), self._files.rounds_saved(), attempts.REQUEUED
        )
        if reason := self._reason_to_give_up(ended):
            return Decision(attempts.GAVE_UP, reason)
        said = attempts.stuck(ended)
        return replace(cause, reason=f"{cause.reason}; {said}") if said else cause

    def _reason_to_give_up(self, ended: Sequence[attempts.Attempt]) -> str:
        return attempts.reason_to_give_up(ended, self._rules.max_requeues, self._rules.seconds)


def _run(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> tuple[int, str | None, bool]:
    """Its exit code, the signal that stopped it, and whether that came before the run took over the signals.

    Until the run takes over the signals one of them ends it at once: there is nothing to save yet. Afterwards they are
    ignored: what is to be done about them is being done.
    """
    early: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        early.append(signal.Signals(number).name)
        sys.exit(EXIT_STOPPED)

    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return code, early[0] if early else _last_stop(), bool(early)


def _leave(reason: str) -> NoReturn:
    """With the reason alone: submitit would show an exception with the traceback of its own machinery."""
    print(f"launch: {reason}", file=sys.stderr, flush=True)
    sys.exit(1)


def _last_stop() -> str | None:
    """What stopped the run, once there is a run: the module is not imported for the question."""
    stop = sys.modules.get("fedspec_dist.processes.stop")
    return stop.last_stop() if stop is not None else None


def _program(name: str) -> Callable[[Sequence[str]], int]:
    """Late: it imports torch, and this module is also imported where a job is submitted."""
    program: Callable[[Sequence[str]], int] = import_module(f"fedspec_dist.{name}").main
    return program


def clean_environment(variables: Any, where: str) -> None:
    """Drop what another launcher left: torchrun's variables, and those of a SLURM job that a local one started in."""
    stale = set(LAUNCHER_VARIABLES)
    if where != "slurm":
        stale |= {name for name in variables if name.startswith("SLURM_") and name != "SLURM_CONF"}
    for name in stale & set(variables):
        del variables[name]
