"""`fedspec COMMAND ...`: every command under one name.

The same as `python -m launch.COMMAND`, but that Python looks in the current folder first there, and takes a `launch.py`
of yours for this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from launch.commands import as_command

# Name -> the module, and what it is for.
COMMANDS = {
    "run": ("fedspec_dist.main", "a run in this process, or a rank of one under torchrun"),
    "submit": ("launch.submit", "a run on SLURM, or here in the background (--cluster local)"),
    "status": ("launch.status", "what became of the runs in a folder"),
    "follow": ("launch.follow", "the log of a submitted run, until it ends"),
    "cancel": ("launch.cancel", "end submitted runs; what is saved stays"),
    "sweep": ("launch.sweep", "many runs from one file: axes, seeds, methods, tuning"),
    "templates": ("launch.templates", "job scripts for sites without Python launchers"),
    "doctor": ("fedspec_dist.doctor", "is everything there that a run needs?"),
}
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name in ("-h", "--help"):
        print("fedspec COMMAND ...; fedspec COMMAND --help tells more", end="\n\n")
        for command, (_, purpose) in COMMANDS.items():
            print(f"  {command:10} {purpose}")
        return 0
    if name not in COMMANDS:
        print(f"fedspec: got {name!r}; allowed: {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    program: Callable[[Sequence[str]], int] = import_module(COMMANDS[name][0]).main
    return as_command(lambda: program(rest))


if __name__ == "__main__":
    sys.exit(main())
