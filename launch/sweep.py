"""Many runs from one file: axes, seeds, methods, tuning.

    python -m launch.sweep SWEEP.yaml [key=value ...]                   on this machine, some ranks at once
    python -m launch.sweep SWEEP.yaml --cluster slurm                   one job array; cluster.time=2h and so on
    python -m launch.sweep SWEEP.yaml --status | --collect results.csv | --dry-run

Overrides apply to all runs. Finished runs are not run again and unfinished ones resume, so the same command goes on
with whatever has become of the runs before, unless they were made with other data or another plugin. `launch/axes.py`
shows the file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedspec_dist.config import ConfigError
from launch import pool
from launch.axes import load_sweep
from launch.changes import Changes
from launch.collect import as_csv, rows, state_tables, summary
from launch.drive import queue_states, run_here, run_on_slurm, say, slurm_plan
from launch.outcomes import Outcomes
from launch.record import write
from launch.start import SubmitError
from launch.status import console
from launch.study import Study
from launch.submission import submit_array

EXIT_USAGE = 2
_OF_RUNS = ("ranks", "max_ranks", "fresh", "accept_changes")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(arguments)
    try:
        _refuse_idle(options)
        outcomes = Outcomes(options.fresh)
        only_looks = options.status or options.collect is not None
        changes = None if options.fresh or only_looks else Changes(options.accept_changes)
        return _run(Study(load_sweep(options.sweep, options.overrides), outcomes, changes), options)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"{where}; choose another output=FOLDER, or another FILE.csv", file=sys.stderr)
        return 1
    except (ConfigError, SubmitError) as error:
        print(f"{'config error: ' if isinstance(error, ConfigError) else ''}{error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else 1


def _refuse_idle(options: argparse.Namespace) -> None:
    """Raises:
    ConfigError: an option that would not be heeded.
    """
    shows = options.dry_run or options.status or options.collect is not None
    if options.wait and (shows or options.cluster != "slurm"):
        raise ConfigError("--wait: is for --cluster slurm and runs that are submitted; here the sweep waits by itself")
    if options.status or options.collect is not None:
        idle = [f"--{name.replace('_', '-')}" for name in _OF_RUNS if getattr(options, name)]
        if idle:
            raise ConfigError(f"{', '.join(idle)}: with --status and --collect nothing runs; leave it out")
    if options.fresh and options.accept_changes:
        raise ConfigError("--accept-changes: is for results that are kept, and --fresh starts over; give one of them")
    if options.cluster == "slurm" and (options.ranks or options.max_ranks):
        raise ConfigError(
            "--ranks, --max-ranks: are for --cluster local; for SLURM give cluster.ranks_per_node=N or "
            "cluster.gpus_per_node=N, and cluster.array_parallelism=N for the runs at once"
        )


def _run(study: Study, options: argparse.Namespace) -> int:
    if options.dry_run:
        _show_plan(study, options)
    elif options.status:
        shown = console()
        for table in state_tables(study, queue_states(study.waiting())):
            shown.print(table)
    elif options.collect is not None:
        _collect(study, options.collect)
    else:
        on_slurm = options.cluster == "slurm"
        if on_slurm:
            code = run_on_slurm(study, options.wait, partial(submit_array, accept_changes=options.accept_changes))
        else:
            code = run_here(study, options.ranks or 1, options.max_ranks, options.accept_changes)
        if options.wait or not on_slurm:
            say(summary(study).rstrip())
        return code
    return 0


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
    parser.add_argument("--ranks", type=_count, help="local: ranks of each run (1)")
    parser.add_argument("--max-ranks", type=_count, help="local: ranks at once (the GPUs, else the CPUs)")
    parser.add_argument("--wait", action="store_true", help="slurm: until all is done, tuning and seeds included")
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--fresh", action="store_true", help="start all runs over, finished ones too")
    before.add_argument(
        "--accept-changes",
        action="store_true",
        help="take what there is, although the data, a plugin or this package changed since; the runs say so",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print what would be run now and stop")
    what.add_argument("--status", action="store_true", help="print how far the runs are and stop")
    what.add_argument("--collect", type=Path, metavar="FILE.csv", help="write a row a run, and FILE.md with the means")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number from 1")
    return int(text)


def _show_plan(study: Study, options: argparse.Namespace) -> None:
    """A line for each run that would be started now, as it can be typed; for SLURM the text for sbatch too."""
    waiting, accepts = study.waiting(), ["--accept-changes"] * options.accept_changes
    for run in waiting:
        say(f"# {study.outcome(run).state}: {run}\n{shlex.join([*pool.command(run, options.ranks or 1), *accepts])}")
    later = "; more when the tuning has results" if study.sweep.tune is not None else ""
    say(f"# {len(waiting)} of {len(study.known())} runs to do{later}")
    if options.cluster == "slurm" and (text := slurm_plan(study)):
        say(f"# sbatch would get:\n{text.rstrip()}")


def _collect(study: Study, path: Path) -> None:
    if path.suffix == ".md":
        raise ConfigError(f"--collect: got {str(path)!r}; the means go to an .md beside it, so give a name like a.csv")
    text = summary(study)
    write(path, as_csv(rows(study)))
    write(path.with_suffix(".md"), text)
    say(f"{text}\n{path} has a row a run, {path.with_suffix('.md')} this table")


if __name__ == "__main__":
    sys.exit(main())
