"""A run whose files or folder are taken away while it works ends with one message, and never as finished."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.cli import Job, metrics_of, model_of, rounds_done, run, run_folder, start
from tests.end_to_end.test_interruptions import CONFIG

pytestmark = pytest.mark.slow

MESSAGE = "was deleted, moved or replaced while this run was at work"

TAKEN: dict[str, Callable[[Path], object]] = {
    "metrics": lambda folder: (folder / "metrics.jsonl").unlink(),
    "folder": lambda folder: folder.rename(folder.parents[1] / "moved"),
}


@pytest.mark.parametrize(("taken", "ranks"), [("metrics", 0), ("folder", 2)])
def test_what_is_taken_away_ends_the_run(taken: str, ranks: int, tmp_path: Path) -> None:
    with start(tmp_path, *CONFIG, ranks=ranks) as job:
        job.wait_until(lambda: rounds_done(tmp_path) >= 3, "round 3")
        folder = run_folder(tmp_path)
        TAKEN[taken](folder)
        ended = job.wait().expect_failure(MESSAGE)
    assert ended.ours.count(MESSAGE) == 1
    assert "Traceback" not in ended.output.split(MESSAGE)[0]
    assert not list(tmp_path.rglob("summary.json"))
    if taken == "folder":
        assert not folder.exists(), "nothing of the run is made anew where it was"
        (tmp_path / "moved").rename(folder)
        run(tmp_path, *CONFIG).expect(0, "finished")
        assert len(metrics_of(tmp_path)) == 8
    else:
        run(tmp_path, *CONFIG).expect(1, "metrics.jsonl has lost 2 of the 2 rounds before", "--fresh")
        run(tmp_path, *CONFIG, "--fresh").expect(0, "finished")


def test_of_two_runs_in_one_place_the_second_is_whole(tmp_path: Path) -> None:
    with start(tmp_path, *CONFIG) as first:
        first.wait_until(lambda: rounds_done(tmp_path) >= 3, "round 3")
        shutil.rmtree(run_folder(tmp_path))
        with start(tmp_path, *CONFIG) as second:
            first.wait().expect(1, MESSAGE)
            second.wait().expect(0, "finished")
    assert [record["round"] for record in metrics_of(tmp_path)] == list(range(1, 9))
    run(tmp_path, *CONFIG, "output=alone").expect(0)
    assert model_of(tmp_path) == model_of(tmp_path, "alone")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_cost_no_run(closed: str, tmp_path: Path) -> None:
    short = [*CONFIG, "rounds=2", "local.epochs=1"]
    quoted = " ".join(f"'{word}'" for word in short)
    with Job(["sh", "-c", f"exec {sys.executable} -m fedspec_dist.main {quoted} {closed}"], tmp_path, {}) as job:
        job.wait().expect(0)
    assert len(metrics_of(tmp_path)) == 2
    log = (run_folder(tmp_path) / "log" / "rank-0.log").read_text()
    assert "Traceback" not in log
    assert not [path for path in run_folder(tmp_path).rglob("*.json*") if "round 1/2" in path.read_text()]
