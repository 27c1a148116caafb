"""The account that a run gives of itself: written by any rank, read by programs, whatever else is in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedspec_dist.core.failures import Kind, as_kind, kind_of
from fedspec_dist.runs.events import DIVERGED, FAILED, FINISHED, RESUMED, STARTED, STOPPED, Events, last_end, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


def test_an_event_is_a_line_with_its_time_attempt_and_job(path: Path) -> None:
    path.parent.mkdir()
    Events(path, "7.0", 1, "node2", "7").write(STARTED, ranks=4)
    Events(path, "7.0", 1, "node2", "7").failure(OSError(28, "No space left"))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert {key: first[key] for key in ("event", "attempt", "job_id", "ranks")} == {
        "event": STARTED,
        "attempt": "7.0",
        "job_id": "7",
        "ranks": 4,
    }
    assert {key: second[key] for key in ("event", "kind", "rank", "host")} == {
        "event": FAILED,
        "kind": "files",
        "rank": 1,
        "host": "node2",
    }
    assert "No space left" in second["message"]
    assert [event.name for event in read(path)] == [STARTED, FAILED]


def test_half_a_line_of_a_killed_process_costs_that_line_only(path: Path) -> None:
    told = Events(path, "a", 0, "here")
    told.write(STARTED)
    with path.open("a") as file:
        file.write('{"event": "fini')
    told.write(FINISHED)
    assert [event.name for event in read(path)] == [STARTED, FINISHED]


def test_a_message_is_bounded(path: Path) -> None:
    Events(path, "a", 0, "here").failure(ValueError("x" * 10**6))
    assert len(path.read_text()) < 3000


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a FIFO", "a folder"])
def test_what_cannot_be_written_is_left_out(path: Path, make: object) -> None:
    path.parent.mkdir()
    make(path)  # type: ignore[operator]
    Events(path, "a", 0, "here").write(STARTED)
    assert read(path) == []


def test_nothing_is_written_through_a_link(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "victim")
    Events(path, "a", 0, "here").write(STARTED)
    assert not (tmp_path / "victim").exists()


def _ends(path: Path, *told: tuple[str, str]) -> str | None:
    for attempt, name in told:
        Events(path, attempt, 0, "here").write(name)
    found = last_end(read(path))
    return found.name if found else None


def test_the_last_start_is_what_counts(path: Path) -> None:
    assert _ends(path) is None
    assert _ends(path, ("a", STARTED)) is None, "at work, or dead without a word"
    assert _ends(path, ("a", FAILED)) == FAILED
    assert _ends(path, ("a", STOPPED)) == FAILED, "of another rank, which ended because of the first"
    assert _ends(path, ("b", STARTED), ("b", RESUMED)) is None
    assert _ends(path, ("b", STOPPED)) == STOPPED
    assert _ends(path, ("b", STARTED)) is None, "started again under the same name"
    assert _ends(path, ("b", DIVERGED), ("b", FAILED)) == DIVERGED
    assert last_end(read(path), since=read(path)[-1].time + 1) is None


def test_what_an_error_says_of_itself_counts_more_than_where_it_came_up() -> None:
    class TornError(ValueError):
        kind = Kind.FILES

    with pytest.raises(TornError) as told, as_kind(Kind.DATA):
        raise TornError("x")
    assert kind_of(told.value) is Kind.FILES
    with pytest.raises(ValueError, match="y") as plain, as_kind(Kind.DATA):
        raise ValueError("y")
    assert kind_of(plain.value) is Kind.DATA
    with pytest.raises(RuntimeError) as bug, as_kind(Kind.DATA):
        raise RuntimeError("z")
    assert kind_of(bug.value) is Kind.ERROR
    assert kind_of(MemoryError()) is Kind.MEMORY


def test_a_folder_that_was_taken_away_is_not_made_again(path: Path) -> None:
    """It may be put back where it was."""
    first, other = Events(path, "a", 0, "here"), Events(path, "a", 1, "here")
    first.write(STARTED)
    path.parent.rename(path.parent.with_name("elsewhere"))
    for told in (first, other):
        told.failure(ValueError("the folder is gone"))
    assert not path.parent.exists()
