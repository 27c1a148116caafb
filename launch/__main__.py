"""`fedspec COMMAND ...`: every command under one name.

The same as `python -m launch.COMMAND`, but that Python looks in the current folder first there, and takes a `launch.py`
of yours for this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from launch.commands import as_command

COMMANDS = {
    "run": "fedspec_dist.main",
    "doctor": "fedspec_dist.doctor",
    **{name: f"launch.{name}" for name in ("submit", "follow", "status", "cancel", "sweep", "templates")},
}
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name in ("-h", "--help"):
        print(f"fedspec COMMAND ...   ({', '.join(COMMANDS)}); fedspec COMMAND --help tells more")
        return 0
    if name not in COMMANDS:
        print(f"fedspec: got {name!r}; allowed: {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    program: Callable[[Sequence[str]], int] = import_module(COMMANDS[name]).main
    return as_command(lambda: program(rest))


if __name__ == "__main__":
    sys.exit(main())
