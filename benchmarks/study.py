"""Run a list of configs one after the other and keep a table of what came out, for `docs/results.md`.

    python -m benchmarks.study benchmarks/studies/fashion_mnist.txt --ranks 2 --output runs data.root=DATA

Each line of the list is a config and its overrides, as typed after `fedspec_dist.main`; `#` starts a comment. A run
that is finished is not run again and one that was interrupted goes on, so the script can be stopped and started at
will. The table is written anew after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedspec_dist.config import load


def command(arguments: list[str], num_ranks: int) -> list[str]:
    """The command line of one run."""
    if num_ranks == 1:
        return [sys.executable, "-m", "fedspec_dist.main", *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    return [*launcher, "-m", "fedspec_dist.main", *arguments]


def row(arguments: list[str], shown: str) -> dict[str, Any] | None:
    """The numbers of a finished run: at the end, the best, and the mean of the last five evaluations."""
    config = load(arguments[0], arguments[1:])
    folder = config.run_folder()
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [record["test_accuracy"] for record in records if record.get("test_accuracy") is not None]
    return {
        "command": shown,
        "seed": config.seed,
        "rounds": summary["rounds"],
        "final accuracy": f"{scores[-1]:.4f}",
        "mean of last 5": f"{sum(scores[-5:]) / len(scores[-5:]):.4f}",
        "best accuracy": f"{max(scores):.4f}",
        "seconds": f"{summary['seconds']:.0f}",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *[list(map(str, row.values())) for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", default="runs")
    parser.add_argument("--table", type=Path, help="where the table goes; beside the runs by default")
    parser.add_argument("overrides", nargs="*", help="added to every run, not shown in the table")
    options = parser.parse_intermixed_args()
    target = options.table or Path(options.output) / f"{options.list.stem}.md"
    lines = [line.split("#")[0].strip() for line in options.list.read_text().splitlines()]
    runs = [(line, [*shlex.split(line), f"output={options.output}", *options.overrides]) for line in lines if line]
    failed = 0
    for _, arguments in runs:
        print("::", shlex.join(command(arguments, options.ranks)), flush=True)
        failed += subprocess.run(command(arguments, options.ranks), check=False).returncode != 0
        rows = [found for shown, run in runs if (found := row(run, f"`{shown}`")) is not None]
        machine = f"{os.cpu_count()} cores, {platform.machine()}, {options.ranks} rank(s) of one thread, no GPU"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{table(rows)}\n{machine}\n")
    print(target.read_text())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
