"""The entry point: `torchrun --nproc_per_node N -m fedspec_dist.main [CONFIG] [key=value ...]`.

Under srun each task is a rank; started alone it is one process. Without a config it is the embedded default:
SpecGradFilter on handwritten digits.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the imports below, which take a second
    from fedspec_dist.distributed.orphans import end_with_launcher, say_interrupted

    say_interrupted()
    end_with_launcher()

import argparse
import logging
from collections.abc import Sequence
from typing import IO, cast

from fedspec_dist.config import Config, ConfigError, load
from fedspec_dist.distributed.environment import LaunchError, is_first, read_environment

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(arguments)
    try:
        path, overrides = _split(options.config)
        config = load(path, overrides)
        if options.print_config:
            if is_first():
                print(config.to_yaml(), end="")
            return 0
        return _run(config, options)
    except ConfigError as error:
        if is_first() or not error.everywhere:
            print(f"config error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run(config: Config, options: argparse.Namespace) -> int:
    # Late, so that a wrong config is refused in a fraction of a second and without torch.
    from rich.console import Console

    from fedspec_dist.distributed import runtime
    from fedspec_dist.rounds.plan import print_plan
    from fedspec_dist.rounds.run import execute
    from fedspec_dist.tracking.console import Output
    from fedspec_dist.tracking.run_folder import log_to_console

    log_to_console(rank=0, num_ranks=1)
    try:
        environment = read_environment()
        if options.debug and environment.num_ranks > 1:
            raise LaunchError("--debug is one process: start it with python -m fedspec_dist.main --debug")
        log_to_console(environment.rank, environment.num_ranks, options.debug)
        console = Console(file=cast(IO[str], Output(sys.stdout)))
        if options.plan:
            return runtime.guard(environment, lambda: print_plan(config, environment, options.ranks, console))
        return runtime.run(
            config.runtime,
            environment,
            lambda job: execute(config, job, options.fresh, console),
            options.debug,
            config.run_folder(),
        )
    except LaunchError as error:
        if is_first() or not error.everywhere:
            logging.getLogger(__name__).error("%s", error)
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
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number from 1")
    return int(text)


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(f"one config file, got {', '.join(files)}; an override is key=value")
    return (files[0] if files else None), [argument for argument in arguments if "=" in argument]


if __name__ == "__main__":
    sys.exit(main())
