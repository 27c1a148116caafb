"""`python -m launch.submit [CONFIG] [key=value ...] --cluster slurm|local|debug`: start a run where there is room.

The config is checked before anything is submitted; the job then runs the resolved copy in `submission/` of its run
folder, so later edits of the file do not reach it. Options stand for keys of `cluster`. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspec_dist.config import ConfigError, load, split_arguments
from fedspec_dist.runs.branch import continued
from launch.changes import Changes
from launch.cluster import CLUSTERS
from launch.commands import as_command, command
from launch.follow import EXIT_DIVERGED, follow_and_report
from launch.record import SubmissionFolder
from launch.start import SubmitError
from launch.submission import Submission, plan, submit

EXIT_USAGE = 2

# Options that stand for a key of `cluster`. Numbers go through as typed, so that the config's message names the key.
_NUMBERS = ("nodes", "gpus-per-node", "ranks-per-node", "cpus-per-rank", "mem-gb")
_TEXTS = ("time", "partition", "account", "qos", "constraint", "exclude")
# Those that a scheduler alone heeds. A config may state their keys all the same.
_FOR_SLURM = ("cpus-per-rank", "mem-gb", "partition", "account", "qos", "constraint", "exclude", "extra")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(arguments)
    try:
        _refuse_idle(vars(options))
        path, overrides = split_arguments(options.config)
        if options.continue_from is not None:
            path, overrides = continued(options.continue_from, path, overrides)
        given = overrides_of(vars(options))
        config = load(path, [*overrides, *given])
        # A local run has a limit only when somebody asks for one: its restarts would gain nothing.
        time_limit = options.time is not None
        if options.dry_run:
            print(plan(config, options.cluster, options.after, time_limit, options.doctor))
            return 0
        files = SubmissionFolder(config.run_folder())
        if not options.doctor and not options.fresh:
            Changes(options.accept_changes).check([config])
        if not options.doctor and not options.fresh and files.finished():
            print(f"{files.run_folder}: this run has already finished; --fresh starts it over")
            return 0
        if not options.doctor and not options.fresh and (why := files.diverged()):
            print(f"{files.run_folder}: this run has already diverged: {why}. --fresh starts it over", file=sys.stderr)
            return EXIT_DIVERGED
        typed = [*([path] if path else []), *overrides, *given]
        submission = submit(
            config,
            typed,
            options.cluster,
            options.after,
            time_limit,
            options.fresh,
            options.doctor,
            options.accept_changes,
        )
    except (ConfigError, SubmitError) as error:
        print(f"{'config error: ' if isinstance(error, ConfigError) else ''}{error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else 1
    if submission.exit_code is not None:
        return submission.exit_code
    print(describe(submission))
    if options.follow or options.wait:
        return follow_and_report(submission.run_folder, options.follow)
    return 0


def _refuse_idle(options: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: an option that this way of starting would not heed.
    """
    cluster = options["cluster"]
    unheeded = {"local": _FOR_SLURM, "debug": (*_FOR_SLURM, "time", "wait", "follow")}.get(cluster, ())
    where = f"--cluster {cluster}"
    if options["dry_run"]:
        unheeded, where = (*unheeded, "wait", "follow", "fresh"), f"{where} --dry-run"
    if given := [option for option in unheeded if options[option.replace("-", "_")]]:
        raise ConfigError(f"--{given[0]}: has no effect with {where}; leave it out")


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """The options that were given, as overrides of the config. Texts are quoted: YAML takes 12:00:00 for a number."""
    found = []
    for option in (*_NUMBERS, *_TEXTS):
        value = options.get(option.replace("-", "_"))
        if value is not None:
            key = f"cluster.{option.replace('-', '_')}"
            found.append(f"{key}={json.dumps(value, ensure_ascii=False) if option in _TEXTS else value}")
    for entry in options.get("extra") or []:
        key, equals, value = entry.removeprefix("--").partition("=")
        if not key:
            raise ConfigError(f"--extra: got {entry!r}; give key=value, or a key alone for an option without a value")
        found.append(f"cluster.extra.{key}={json.dumps(value, ensure_ascii=False) if equals else 'true'}")
    return found


def describe(submission: Submission) -> str:
    folder = shlex.quote(str(submission.run_folder))
    return (
        f"job          {submission.job_id}\n"
        f"run folder   {submission.run_folder}\n"
        f"log          {submission.log}\n"
        f"follow       {command('follow')} {folder}\n"
        f"cancel       {command('cancel')} {folder}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", nargs="*", metavar="CONFIG | key=value", help="a YAML file, then overrides")
    add(
        "--cluster", choices=CLUSTERS, default="slurm", help="slurm (default), local: this machine, debug: this process"
    )
    add("--nodes", metavar="N")
    add("--gpus-per-node", metavar="N", help="as many ranks a node; 0 for ranks on CPUs")
    add("--ranks-per-node", metavar="N", help="unless it is one a GPU")
    add("--cpus-per-rank", metavar="N")
    add("--mem-gb", metavar="GB", help="of each node")
    add("--time", metavar="90m|4h|1d12h|HH:MM:SS", help="the limit; --cluster local has none without this option")
    for option in _TEXTS[1:]:
        add(f"--{option}", metavar="TEXT")
    add("--extra", action="append", metavar="KEY=VALUE", help="any other option of sbatch; may be repeated")
    add("--after", metavar="JOBID", help="start when that job has ended, however it ended")
    add("--dry-run", action="store_true", help="print the plan and the text for sbatch; submit nothing")
    add("--wait", action="store_true", help="until the job is over; exit 0 if the run finished")
    add("--follow", action="store_true", help="the same, showing rank 0's log")
    add("--continue-from", type=Path, metavar="RUN", help="more rounds of a run, as fedspec_dist.main has it")
    add("--fresh", action="store_true", help="delete what the run folder has of this run")
    add(
        "--accept-changes",
        action="store_true",
        help="go on although the data, a plugin or this package changed since; environment.json says so",
    )
    add("--doctor", action="store_true", help="submit the health check (fedspec_dist.doctor) with this config")
    return parser


if __name__ == "__main__":
    sys.exit(as_command(main))
