"""The entry point: `torchrun --nproc_per_node N -m fedspec_dist.main [CONFIG] [key=value ...]`.

Under srun each task is a rank; started alone it is one process. Without a config it is the embedded default:
SpecGradFilter on handwritten digits.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the imports below, which take a second
    from fedspec_dist.processes.orphans import end_with_launcher, say_interrupted

    say_interrupted()
    end_with_launcher()

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from fedspec_dist.config import Config, ConfigError, load, split_arguments
from fedspec_dist.processes.environment import (
    Environment,
    LaunchError,
    is_first,
    name_of_start,
    read_environment,
    tell_launcher,
)
from fedspec_dist.runs.branch import continued
from fedspec_dist.runs.streams import Output, open_standard_streams

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    open_standard_streams()
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if problem := _idle_option(options):
        parser.error(problem)
    try:
        file, overrides = split_arguments(options.config)
        if options.continue_from is not None:
            file, overrides = continued(options.continue_from, file, overrides)
        config = load(file, overrides)
        if options.print_config:
            if is_first():
                print(config.to_yaml(), end="")
            return 0
        return _run(config, options)
    except ConfigError as error:
        if is_first() or not error.everywhere:
            print(f"config error: {error}", file=sys.stderr)
            tell_launcher(f"config error: {error}")
        return EXIT_USAGE


def _run(config: Config, options: argparse.Namespace) -> int:
    # torch warns with pages of C++ frames of a store that is gone; what has ended we say ourselves. Errors are shown.
    if not options.debug:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Late, so that a wrong config is refused in a fraction of a second and without torch.
    from rich.console import Console

    from fedspec_dist.processes import runtime
    from fedspec_dist.rounds.plan import print_plan
    from fedspec_dist.rounds.run import execute
    from fedspec_dist.runs.events import Events
    from fedspec_dist.runs.folder import RunFolder, log_to_console

    log_to_console(rank=0, num_ranks=1)
    environment, (start, job_id) = Environment(), name_of_start()
    folder = RunFolder(config.run_folder())
    try:
        environment = read_environment()
        if options.debug and environment.num_ranks > 1:
            raise LaunchError("--debug is one process: start it with python -m fedspec_dist.main --debug")
        log_to_console(environment.rank, environment.num_ranks, options.debug)
        console = Console(file=cast(IO[str], Output(sys.stdout)))
        if options.plan:
            return runtime.guard(environment, lambda: print_plan(config, environment, options.ranks, console))
        events = Events(folder.events, start, environment.rank, environment.host, job_id)
        return runtime.run(
            config.runtime,
            environment,
            lambda job: execute(config, job, options.fresh, console, events, options.accept_changes),
            options.debug,
            folder.path,
            events.failure,
        )
    except LaunchError as error:
        if is_first() or not error.everywhere:
            if not options.plan and folder.path.is_dir():
                Events(folder.events, start, environment.rank, environment.host, job_id).failure(error)
            logging.getLogger(__name__).error("%s", error)
            tell_launcher(str(error))
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedspec_dist.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="*", metavar="CONFIG | key=value", help="a YAML file, then overrides")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--plan", action="store_true", help="print who would do what, in what memory, and stop")
    parser.add_argument("--ranks", type=_count, help="with --plan: for this many ranks")
    parser.add_argument(
        "--debug",
        action="store_true",
        help="one process: breakpoints work; autograd's anomaly checks, full log and tracebacks",
    )
    parser.add_argument(
        "--continue-from",
        type=Path,
        metavar="RUN",
        help="more rounds of a run, with its config: a new run that starts from its newest checkpoint (rounds=N more)",
    )
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="go on although the data, a plugin or this package changed since; environment.json says so",
    )
    return parser


def _idle_option(options: argparse.Namespace) -> str | None:
    """What was asked for and would not be heeded."""
    if options.ranks is not None and not options.plan:
        return "--ranks: is for --plan alone; a run has the ranks that its launcher starts: torchrun --nproc_per_node N"
    if options.plan and options.print_config:
        return "--print-config, --plan: give one of them"
    if (options.fresh or options.accept_changes) and (options.plan or options.print_config):
        return "--fresh, --accept-changes: with --plan and --print-config nothing runs; leave them out"
    if options.fresh and options.accept_changes:
        return "--accept-changes: is for results that are kept, and --fresh starts over; give one of them"
    if options.debug and options.print_config:
        return "--debug: with --print-config nothing runs; leave it out"
    return None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
