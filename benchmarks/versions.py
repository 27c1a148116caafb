"""Rounds and memory of this checkout against another's: `python -m benchmarks.versions OTHER --pairs 8 -- --rounds 20`.

What follows `--` goes to `benchmarks.floor --part floor`, which each checkout runs from its own sources, in turn. The
ratios are of neighbouring runs, so that a machine that is slower for a while slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.spread import quartiles

_HERE = Path(__file__).parents[1]
# Started for each measurement, since a process only knows the largest of all its children.
_PEAK = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
_PEAK += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
_LABELS = {
    "wall": "seconds a round",
    "cpu": "processor seconds a round",
    "floor": "of the plain loop's time",
    "cpu floor": "of its processor time",
    "peak": "MiB at the peak of a rank",
}


def measure(checkout: Path, arguments: Sequence[str]) -> dict[str, float]:
    """One run of `benchmarks.floor` from a checkout: medians over its rounds, and the largest process's peak."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "floor.json"
        command = [sys.executable, "-m", "benchmarks.floor", "--part", "floor", "--output", str(output), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        ended = subprocess.run(
            [sys.executable, "-c", _PEAK, *command], cwd=checkout, env=environment, capture_output=True, text=True
        )
        if ended.returncode != 0:
            raise RuntimeError(f"benchmarks.floor failed in {checkout}:\n{ended.stderr[-2000:]}")
        floor = json.loads(output.read_text())["floor"]
    seconds, cpu = (floor[key]["ours"]["median"] for key in ("seconds", "cpu_seconds"))
    peak = int(ended.stdout.split()[-1]) / 1024  # Linux counts in KiB
    ratios = {"floor": floor["ratio"]["median"], "cpu floor": floor["cpu_ratio"]["median"]}
    return {"wall": seconds, "cpu": cpu, **ratios, "peak": peak}


def main(given: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if given is None else given)]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="benchmarks.versions", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit, as `git worktree add` makes it")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args(words[:cut])
    other, arguments = options.other.resolve(), words[cut + 1 :]
    checkouts = {"here": _HERE, "there": other}
    runs: dict[str, list[dict[str, float]]] = {"here": [], "there": []}
    for pair in range(options.pairs):
        for place in ("here", "there") if pair % 2 else ("there", "here"):
            runs[place].append(measure(checkouts[place], arguments))
        ratios = (f"{key} {runs['here'][-1][key] / runs['there'][-1][key]:.3f}" for key in _LABELS)
        print(f"pair {pair + 1}: " + ", ".join(ratios), flush=True)
    for key, label in _LABELS.items():
        here, there = (np.array([run[key] for run in runs[place]]) for place in ("here", "there"))
        medians = [quartiles(values)["median"] for values in (here, there)]
        ratio = quartiles(here / there)
        print(
            f"{label}: {medians[0]:.4g} here, {medians[1]:.4g} there; here / there "
            f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
