"""Is everything there that a run needs? `python -m fedspec_dist.doctor [CONFIG] [key=value ...]`.

Alone, under torchrun, under srun and through `launch.submit --doctor`: every rank looks around, rank 0 reports. The
last lines say what to mend first. Exit code 0 when healthy, 1 when not, 2 for a wrong config.

`facts.py` and `folder.py` look, `examination.py` does so on all ranks together, `diagnosis.py` draws conclusions.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import IO, cast

from fedspec_dist.config import Config, ConfigError, load, split_arguments
from fedspec_dist.processes.environment import LaunchError, is_first, read_environment
from fedspec_dist.runs.streams import Output, open_standard_streams

EXIT_UNHEALTHY, EXIT_USAGE = 1, 2
# Who asks the doctor does not want to wait ten minutes for a rank that never comes.
_PATIENCE_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    open_standard_streams()
    options = _parser().parse_args(arguments)
    try:
        config = load(*split_arguments(options.config))
        config.run_folder()
    except ConfigError as error:
        if is_first():
            print(f"config error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return _examine(config)


def _examine(config: Config) -> int:
    # Late, so that a wrong config is refused in a fraction of a second and without torch.
    from rich.console import Console

    from fedspec_dist.doctor.examination import examine
    from fedspec_dist.processes import runtime
    from fedspec_dist.runs.folder import log_to_console

    log_to_console(rank=0, num_ranks=1)
    try:
        environment = read_environment()
        log_to_console(environment.rank, environment.num_ranks)
        console = Console(file=cast(IO[str], Output(sys.stdout)))
        # What the config asks of device and backend is looked at, not needed: the ranks have to talk in any case. Only
        # a GPU that is there and cannot be used ends it here as it would end a run.
        settings = config.runtime.model_copy(
            update={
                "device": "cpu" if config.runtime.device == "cpu" else "auto",
                "precision": "float32",
                "backend": "gloo",
                "timeout_s": min(_PATIENCE_S, config.runtime.timeout_s),
            }
        )
        return runtime.run(settings, environment, lambda job: examine(config, job, console), folder=config.run_folder())
    except LaunchError as error:
        if is_first() or not error.everywhere:
            logging.getLogger(__name__).error("first thing to fix: %s", error)
        return EXIT_UNHEALTHY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedspec_dist.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="*", metavar="CONFIG | key=value", help="as for fedspec_dist.main")
    return parser
