"""Compare methods fairly: each at the best of a grid of the same size, then on seeds that it was not tuned on.

    python -m benchmarks.compare benchmarks/studies/methods.yaml --output runs --processes 2 data.root=FOLDER

The study file has `config` (a YAML config), `overrides` for all runs, `metric`, `tuning_seed`, `seeds`, `budget` (runs
that each method may spend on its grid; another number is an error) and `methods`: a name, its `overrides`, its `grid`
(key -> values; all combinations are tried). A run that has finished is not run again, so the script can be stopped and
started at will. The tables are written anew after every run, as far as the runs have come.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from fedspec_dist.config import load

# The last evaluations, averaged: single ones jump from cohort to cohort.
_LAST = 5


@dataclass(frozen=True)
class Study:
    config: str
    overrides: list[str]
    tuning_seed: int
    seeds: list[int]
    budget: int
    methods: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path, more: Sequence[str]) -> Study:
        content = yaml.safe_load(path.read_text())
        study = cls(**content | {"overrides": [*content.get("overrides", []), *more]})
        for name in study.methods:
            if len(study.grid(name)) != study.budget:
                raise ValueError(f"{path}: {name} has {len(study.grid(name))} points, the budget is {study.budget}")
        return study

    def grid(self, name: str) -> list[list[str]]:
        """The overrides of each point."""
        axes = [[f"{key}={value}" for value in values] for key, values in self.methods[name]["grid"].items()]
        return [list(point) for point in itertools.product(*axes)]

    def arguments(self, name: str, point: Sequence[str], seed: int) -> list[str]:
        own = self.methods[name].get("overrides", [])
        return [self.config, *self.overrides, *own, *point, f"seed={seed}"]


def score(arguments: Sequence[str]) -> float | None:
    """Mean test accuracy of the last evaluations of a finished run; 0 for one that diverged; None if not yet run."""
    folder = load(arguments[0], arguments[1:]).run_folder()
    if (folder / "diverged").exists():
        return 0.0
    if not (folder / "summary.json").exists():
        return None
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [record["test_accuracy"] for record in records if record.get("test_accuracy") is not None]
    return mean(accuracies[-_LAST:])


def run(arguments: Sequence[str]) -> None:
    """One run in this process; one whose updates are no longer finite is marked as diverged."""
    from fedspec_dist.main import main as fedspec_main

    folder = load(arguments[0], arguments[1:]).run_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "study.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        code = fedspec_main(list(arguments))
    if code:
        if "non-finite" not in (folder / "study.log").read_text():
            raise RuntimeError(f"{' '.join(arguments)}: exit code {code}, see {folder / 'study.log'}")
        (folder / "diverged").touch()


def best(study: Study, name: str) -> tuple[list[str], float] | None:
    """The best point of a method's grid on the tuning seed, once all have been run; the first of equals."""
    scored = [(point, score(study.arguments(name, point, study.tuning_seed))) for point in study.grid(name)]
    if any(value is None for _, value in scored):
        return None
    return max(((point, value or 0.0) for point, value in scored), key=lambda item: item[1])


def pending(study: Study) -> Iterator[list[str]]:
    """What can be run now: first all grids, then the other seeds of the methods whose grid is complete."""
    tuning = [study.arguments(n, point, study.tuning_seed) for n in study.methods for point in study.grid(n)]
    found = {name: best(study, name) for name in study.methods}
    final = [study.arguments(n, f[0], seed) for seed in study.seeds for n, f in found.items() if f is not None]
    yield from (arguments for arguments in [*tuning, *final] if score(arguments) is None)


def table(study: Study) -> str:
    """Markdown: each method at its best point, over the seeds that have been run; sorted."""
    rows = []
    for name in study.methods:
        found = best(study, name)
        if found is None:
            continue
        point, tuned = found
        scores = [value for seed in study.seeds if (value := score(study.arguments(name, point, seed))) is not None]
        spread = f"{stdev(scores):.3f}" if len(scores) > 1 else ""
        average = mean(scores) if scores else None
        shown = f"{average:.3f}" if average is not None else ""
        rows.append(
            (average or 0.0, f"| {name} | `{' '.join(point)}` | {tuned:.3f} | {shown} | {spread} | {len(scores)} |")
        )
    head = "| method | best point | tuning seed | mean | spread | seeds |\n| --- | --- | --- | --- | --- | --- |\n"
    return head + "".join(f"{row}\n" for _, row in sorted(rows, key=lambda item: -item[0]))


def _worker(arguments: list[str]) -> list[str]:
    run(arguments)
    return arguments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--output", default="runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--table-only", action="store_true", help="print the table of what has been run")
    parser.add_argument("overrides", nargs="*", help="added to every run")
    options = parser.parse_intermixed_args()
    study = Study.read(options.study, [f"output={options.output}", *options.overrides])
    target = Path(options.output) / f"{options.study.stem}.md"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedspec_dist.rounds.run", "fedspec_dist.main"])
    os.environ["OMP_NUM_THREADS"] = "1"
    failed: list[str] = []
    # Twice: the other seeds of a method can be run once its grid has been.
    for _ in range(0 if options.table_only else 2):
        waiting = list(pending(study))
        with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
            for future in as_completed([pool.submit(_worker, arguments) for arguments in waiting]):
                if error := future.exception():
                    failed.append(str(error))
                    print(error, file=sys.stderr, flush=True)
                    continue
                print(f"{score(future.result()):.4f}  {' '.join(future.result())}", flush=True)
                target.write_text(table(study))
    print(table(study))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
