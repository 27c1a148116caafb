"""The benchmark at tiny sizes: it runs, and both loops train the same model. No claim about time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.filter_share import measure_filter
from benchmarks.floor import TOLERANCE, require_same_model
from fedspec_dist.config.methods import MODELS

ROOT = Path(__file__).parents[2]
PLAIN = ("plain contiguous", "plain channels_last")


def test_a_quick_run_writes_its_result_and_the_models_agree(tmp_path: Path) -> None:
    output = tmp_path / "floor.json"
    command = [sys.executable, "-m", "benchmarks.floor", "--quick", "--part", "floor", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "times the faster plain loop" in done.stdout
    result = json.loads(output.read_text())
    floor = result["floor"]
    assert (floor["model"], floor["ranks"], floor["rounds"], floor["num_parameters"]) == ("lenet", 2, 3, 62006)
    assert floor["fastest_plain"] in PLAIN
    assert floor["ratio"] == floor["ratios"][floor["fastest_plain"]]
    for key in ("seconds", "cpu_seconds"):
        assert set(floor[key]) == {"ours", *PLAIN}
        assert all(0 < v["q1"] <= v["median"] <= v["q3"] for v in floor[key].values())
    for differences in floor["differences"].values():
        assert len(differences) == 6  # two rounds to warm up, three counted, one with the evaluation
        assert 0 < max(differences) < 1e-5
    assert "filter" not in result


def test_the_share_of_the_filter_is_measured_in_two_ways() -> None:
    result = measure_filter(MODELS["lenet"].build((3, 32, 32), 10), batch_size=4, ratio=0.05, repeats=2)
    assert result["num_parameters"] == 62006
    assert 0 < result["share_alone"]["median"] < 1
    assert result["share"]["median"] < 1
    assert all(result[f"step_ms_{how}"]["median"] > 0 for how in ("with", "without"))


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ([2 * TOLERANCE, 0.0], "after round 1"),
        ([0.0, float("nan")], "after round 2"),
        ([0.0, 1e-8, 0.5, 0.0], r"ours and plain differ by 0\.5 in a parameter after round 3; allowed: 5e-05"),
    ],
)
def test_loops_that_differ_are_refused(differences: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_same_model({"differences": {"plain": differences}})


def test_roundings_are_accepted() -> None:
    """Up to the limit; the test above shows that it refuses what is beyond."""
    assert require_same_model({"differences": {"plain": [1e-8, TOLERANCE, 2e-7]}}) is None  # type: ignore[func-returns-value]
