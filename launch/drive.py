"""Getting the runs of a sweep done: in a pool of this host's processes, or as job arrays of SLURM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from fedspec_dist.config import ConfigError
from launch import pool, queue
from launch.axes import Run
from launch.cluster import check, sbatch_parameters, sbatch_text, setup_lines
from launch.collect import one_line, write_report
from launch.outcomes import CONSOLE, QUEUED, RUNNING
from launch.record import SubmissionFolder
from launch.start import ROOT
from launch.study import Study
from launch.submission import Submission, submit_array

EXIT_FAILED, EXIT_STOPPED = 1, 75
_POLL_S = 0.2
_QUEUE_POLL_S = 5.0
_RELEASE_S = 5.0
# On a network file system a file of another host may be seen this much later than the end of its job.
_SETTLE_S = 10.0
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def queue_states(runs: Iterable[Run]) -> dict[Path, str]:
    """The runs that a submitted job is at work on or waits for, by folder."""
    records = {run.folder: SubmissionFolder(run.folder).record() for run in runs}
    slurm = queue.slurm_states(r.job_id for r in records.values() if r is not None and r.cluster == "slurm")
    found = {}
    for folder, record in records.items():
        if record is None:
            continue
        if record.cluster == "local":
            state = queue.local_state(record.job_id, record.folder, record.host)
        else:
            state = slurm.get(record.job_id, queue.QueueState(queue.GONE))
        if state.is_alive:
            found[folder] = RUNNING if state.name in ("RUNNING", "COMPLETING") else QUEUED
    return found


# ------------------------------------------------------------------------------------------ here


def run_here(study: Study, ranks: int, max_ranks: int | None, accept_changes: bool = False) -> int:
    """All runs, so many ranks at once; the exit code."""
    gpus = pool.visible_gpus(os.environ)
    limit = max_ranks or len(gpus) or _num_cpus()
    if ranks > limit:
        raise ConfigError(f"--ranks: got {ranks}, more than the {limit} at once; give --max-ranks {ranks} to allow it")
    with stop_signals() as stopped:
        options = ["--accept-changes"] if accept_changes else []
        failed = _drive(study, pool.Pool(limit, ranks, gpus, options), stopped)
        if stopped():
            print("stopped; the same command goes on", file=sys.stderr)
            return EXIT_STOPPED
    return EXIT_FAILED if _say_lost(study) or failed else 0


def _say_lost(study: Study) -> bool:
    """Name the cases that come to nothing; whether there are any."""
    lost = study.lost()
    for case in lost:
        say(f"{case}: no point of its grid has a finite result, so its seeds are not run; try other values")
    return bool(lost)


def _num_cpus() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _drive(study: Study, working: pool.Pool, stopped: Callable[[], int]) -> int:
    """Run until nothing is wanted any more; returns how many failed. Stops on a signal, at once on a second."""
    elsewhere = set(queue_states(study.waiting()))
    tried: set[Path] = set(elsewhere)
    waiting = _to_start(study, tried)
    ended = failed = 0
    say(f"{len(waiting)} runs to do, {working.slots} at once; what they print is in RUN/{CONSOLE}")
    try:
        while (waiting or working.working) and not stopped():
            while waiting and working.has_room():
                run = waiting.pop(0)
                tried.add(run.folder)
                study.start_over(run)
                working.start(run)
            for run, code in working.ended():
                ended += 1
                failed += _report(study, run, code)
                waiting = _to_start(study, tried)
                write_report(study)
                say(f"  {ended} ended, {len(waiting)} waiting")
            time.sleep(_POLL_S)
    finally:
        if working.working:
            say(f"stopping {len(working.working)} runs; a second signal kills them")
        working.ask_to_stop()
        _wait(working, stopped)
    if others := [run for run in study.waiting() if run.folder in elsewhere or study.outcome(run).state == RUNNING]:
        say(f"left to the jobs that are at work on them or queued: {len(others)} runs, for example {others[0].folder}")
    return failed


def _wait(working: pool.Pool, stopped: Callable[[], int]) -> None:
    deadline = time.monotonic() + pool.GRACE_S
    while not working.wait(_POLL_S):
        if stopped() > 1 or time.monotonic() > deadline:
            working.kill()


def _to_start(study: Study, tried: set[Path]) -> list[Run]:
    """Asked anew after every end: another sweep of the same runs may have begun some of them."""
    return [run for run in study.waiting() if run.folder not in tried and study.outcome(run).state != RUNNING]


def _report(study: Study, run: Run, code: int) -> bool:
    """Say what became of a run; whether it failed."""
    # A rank that was killed, or dies of torchrun's end, may hold the run's lock a moment longer than its process shows.
    deadline = time.monotonic() + _RELEASE_S
    while study.outcome(run).state == RUNNING and time.monotonic() < deadline:
        time.sleep(0.05)
    outcome = study.outcome(run)
    say(one_line(study, run))
    if outcome.complete:
        return False
    say(f"  exit code {code}: {outcome.error or _last_line(run.folder / CONSOLE)}")
    say(f"  all that it said: {run.folder / CONSOLE}")
    return True


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """How many signals to stop have come; they do nothing else meanwhile."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in _STOPPING}
    try:
        yield lambda: len(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------ SLURM


def run_on_slurm(study: Study, wait: bool, submit: Callable[..., list[Submission]] = submit_array) -> int:
    """One job array of all that can be run now; with `wait`, until nothing is wanted any more. The exit code."""
    tried: set[Path] = set()
    with stop_signals() as stopped:
        while True:
            queued = queue_states(study.waiting())
            runs = [run for run in study.waiting() if run.folder not in tried and run.folder not in queued]
            if runs:
                for run in runs:
                    study.start_over(run)
                submissions = submit([(run.config, run.arguments) for run in runs], name=study.sweep.name)
                tried |= {run.folder for run in runs}
                first = submissions[0]
                say(f"job {first.job_id.split('_')[0]}: {len(runs)} runs; logs in {first.log.parent}")
            elif not queued:
                break
            if not wait:
                say(f"{len(queued)} runs were in the queue before" if queued else "--status shows how they get on")
                if study.sweep.tune is not None:
                    say("start the same command again when they have ended: what comes next depends on the results")
                return 0
            if not _wait_for_queue(study, tried, stopped):
                say("no longer waiting; the jobs go on, and python -m launch.cancel RUN ends one")
                return EXIT_STOPPED
    failed = study.waiting()
    for run in failed:
        say(f"{one_line(study, run)}: {study.outcome(run).error or f'see python -m launch.status {run.folder}'}")
    return EXIT_FAILED if _say_lost(study) or failed else 0


def _wait_for_queue(study: Study, tried: set[Path], stopped: Callable[[], int]) -> bool:
    """Until no run is in the queue and the ends of those tried are seen; False when a signal came first."""
    while queue_states(study.waiting()):
        if not _pause(_QUEUE_POLL_S, stopped):
            return False
        write_report(study)
    deadline = time.monotonic() + _SETTLE_S
    while (late := [run for run in study.waiting() if run.folder in tried]) and time.monotonic() < deadline:
        for run in late:
            with suppress(OSError):
                os.listdir(run.folder)  # NFS then asks its server about the files in it
        if not _pause(_POLL_S, stopped):
            return False
    return True


def _pause(seconds: float, stopped: Callable[[], int]) -> bool:
    """False when a signal came first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if stopped():
            return False
        time.sleep(_POLL_S)
    return True


def slurm_plan(study: Study) -> str:
    """What sbatch would get for the runs that can be run now."""
    runs = study.waiting()
    if not runs:
        return ""
    config = runs[0].config
    check(config, "slurm")
    folder = config.run_folder().absolute().parent / ".arrays" / "DATE-TIME"
    setup = setup_lines(sys.executable, ROOT, folder)
    parameters = sbatch_parameters(config.cluster, study.sweep.name, setup, array=True)
    return sbatch_text(parameters, sys.executable, folder, len(runs))


def say(line: str) -> None:
    print(line, flush=True)
