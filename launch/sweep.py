"""Many runs from one file: axes, seeds, methods, tuning.

    python -m launch.sweep SWEEP.yaml [key=value ...]                   on this machine, some ranks at once
    python -m launch.sweep SWEEP.yaml --cluster slurm                   one job array
    python -m launch.sweep SWEEP.yaml --status | --collect results.csv | --dry-run

Overrides apply to all runs. Finished runs are not run again and unfinished ones resume, so the same command goes on
with whatever has become of the runs before. `launch/axes.py` shows the file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from fedspec_dist.config import ConfigError
from launch import pool
from launch.axes import Run, load_sweep
from launch.collect import as_csv, one_line, rows, state_tables, summary
from launch.outcomes import CONSOLE, RUNNING, Outcomes
from launch.study import Study, unique

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 75
_POLL_S = 0.2
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(arguments)
    try:
        study = Study(load_sweep(options.sweep, options.overrides), Outcomes())
        if options.dry_run:
            _show_plan(study, options.ranks)
        elif options.status:
            _show_status(study)
        elif options.collect is not None:
            _collect(study, options.collect)
        else:
            return _run_here(study, options)
        return 0
    except ConfigError as error:
        print(f"sweep error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all runs")
    parser.add_argument("--cluster", choices=("local", "slurm"), default="local")
    parser.add_argument("--ranks", type=_count, default=1, help="local: ranks of each run (1)")
    parser.add_argument("--max-ranks", type=_count, help="local: ranks at once (the GPUs, else the CPUs)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print what would be run now and stop")
    what.add_argument("--status", action="store_true", help="print how far the runs are and stop")
    what.add_argument("--collect", type=Path, metavar="FILE.csv", help="write a row a run, and FILE.md with the means")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number from 1")
    return int(text)


# ------------------------------------------------------------------------------------------ here


def _run_here(study: Study, options: argparse.Namespace) -> int:
    gpus = pool.visible_gpus(os.environ)
    max_ranks = options.max_ranks or len(gpus) or len(os.sched_getaffinity(0))
    if options.ranks > max_ranks:
        raise ConfigError(f"--ranks: got {options.ranks}, more than --max-ranks, {max_ranks}")
    with _stop_signals() as stopped:
        failed = _drive(study, pool.Pool(max_ranks, options.ranks, gpus), stopped)
    print(summary(study), end="")
    if stopped():
        print("stopped; the same command goes on", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_FAILED if failed else 0


def _drive(study: Study, working: pool.Pool, stopped: Callable[[], int]) -> int:
    """Run until nothing is wanted any more; returns how many runs failed. Stops on a signal, at once on a second."""
    tried: set[Path] = set()
    waiting = _to_start(study, tried)
    done = failed = 0
    _say(f"{len(waiting)} runs to do, {working.slots} at once; output in RUN/{CONSOLE}")
    try:
        while (waiting or working.working) and not stopped():
            while waiting and working.has_room():
                tried.add(waiting[0].folder)
                working.start(waiting.pop(0))
            for run, code in working.ended():
                done += 1
                failed += _report(study, run, code)
                waiting = _to_start(study, tried)
                _write_report(study)
                _say(f"  {done} ended, {len(waiting)} waiting")
            time.sleep(_POLL_S)
        return failed
    finally:
        if working.working:
            _say(f"stopping {len(working.working)} runs; a second signal kills them")
        working.ask_to_stop()
        _wait(working, stopped)


def _wait(working: pool.Pool, stopped: Callable[[], int]) -> None:
    deadline = time.monotonic() + pool.GRACE_S
    while not working.wait(_POLL_S):
        if stopped() > 1 or time.monotonic() > deadline:
            working.kill()


def _to_start(study: Study, tried: set[Path]) -> list[Run]:
    return [run for run in study.waiting() if run.folder not in tried and study.outcome(run).state != RUNNING]


def _report(study: Study, run: Run, code: int) -> bool:
    """Say what became of a run; whether it failed."""
    outcome = study.outcome(run)
    _say(one_line(study, run))
    if outcome.complete:
        return False
    _say(f"  exit code {code}: {outcome.error or _last_line(run.folder / CONSOLE)}")
    _say(f"  all it said: {run.folder / CONSOLE}")
    return True


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "it printed nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


@contextmanager
def _stop_signals() -> Iterator[Callable[[], int]]:
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


# ------------------------------------------------------------------------------------------ tables


def _show_plan(study: Study, ranks: int) -> None:
    """A line for each run that would be started now, as it can be typed."""
    known = unique(run for item in study.progress() for run in [*item.tuning, *item.final])
    waiting = study.waiting()
    for run in waiting:
        print(f"# {study.outcome(run).state}: {run}\n{shlex.join(pool.command(run, ranks))}")
    later = "; more once the tuning has results" if study.sweep.tune else ""
    print(f"# {len(waiting)} of {len(known)} runs to do{later}")


def _show_status(study: Study) -> None:
    console = Console()
    for table in state_tables(study, {}):
        console.print(table)


def _collect(study: Study, path: Path) -> None:
    if path.suffix == ".md":
        raise ConfigError(f"--collect: got {str(path)!r}; the means go to the .md beside it, give a name such as a.csv")
    text = summary(study)
    _write(path, as_csv(rows(study)))
    _write(path.with_suffix(".md"), text)
    print(f"{text}\n{path} has a row a run, {path.with_suffix('.md')} this table")


def _write_report(study: Study) -> None:
    first = study.sweep.first_runs()[0]
    _write(first.folder.parent / f"{study.sweep.name}.md", summary(study))


def _write(path: Path, text: str) -> None:
    from fedspec_dist.tracking.run_folder import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
