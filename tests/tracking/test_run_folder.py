"""The run folder: one run at a time, emptied on request, written whole, and said plainly when it cannot be."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedspec_dist.runs.folder import (
    OutputError,
    RunFolder,
    git_state,
    log_to_console,
    log_to_file,
    write_json,
)

_HOLDER = """
import sys, time
from pathlib import Path
from fedspec_dist.runs.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.open(fresh=False)
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_second_run_is_refused_with_the_first_ones_name_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        message = rf"in use by process {holder.pid} on {os.uname().nodename}; wait for it, stop it, or give this run"
        with pytest.raises(ValueError, match=message):
            RunFolder(path).open(fresh=True)
        holder.kill()
    folder = RunFolder(path)
    folder.open(fresh=False)
    assert f"process {os.getpid()}" in (path / ".lock").read_text()
    folder.close()


def test_one_that_is_closed_can_be_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        folder = RunFolder(tmp_path / "run")
        folder.open(fresh=False)
        folder.close()


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    folder = RunFolder(tmp_path)
    folder.open(fresh=False)
    folder.close()


def test_fresh_empties_the_folder_and_nothing_beyond_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    path = tmp_path / "run"
    (path / "checkpoints" / "round-000001").mkdir(parents=True)
    (path / "summary.json").write_text("{}")
    (path / "link").symlink_to(outside)
    folder = RunFolder(path)
    folder.open(fresh=True)
    assert [entry.name for entry in path.iterdir()] == [".lock"]
    assert (outside / "kept").exists()
    folder.close()


def test_a_fresh_start_killed_half_way_does_not_look_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "a").mkdir()
    write_json(tmp_path / "summary.json", {"status": "finished"})
    removed: list[str] = []

    def killed_at_the_second(path: Path) -> None:
        removed.append(path.name)
        if len(removed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed_at_the_second)
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        folder.open(fresh=True)
    assert removed[0] == "checkpoints"
    assert folder.ended() is None
    folder.close()


@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run"])
def test_a_place_that_cannot_be_written_is_named(place: str) -> None:
    with pytest.raises(ValueError, match=rf"output: the run folder {place} cannot be written: .*another output="):
        RunFolder(Path(place)).open(fresh=False)


@pytest.mark.parametrize("content", ["", "[]", '{"status": "stopped"}', '"finished"', "\xff"])
def test_only_a_whole_summary_says_that_a_run_has_finished(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.ended() is None
    folder.summary.write_text(content, encoding="latin-1")
    assert folder.ended() is None
    write_json(folder.summary, {"status": "finished", "rounds": 3})
    assert folder.ended() == {"status": "finished", "rounds": 3}


def test_json_is_strict_and_renamed_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"loss": float("nan"), "deep": {"list": [float("inf"), 1]}})
    assert json.loads(path.read_text()) == {"loss": None, "deep": {"list": [None, 1]}}

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OutputError, match=r"summary\.json could not be written: No space left on device.*resume"):
        write_json(path, {})
    assert json.loads(path.read_text())["loss"] is None


def test_rank_0_tells_what_it_does_and_the_others_only_warn(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        log_to_console(rank, num_ranks=2)
        logging.getLogger("fedspec_dist.x").info("news of %d", rank)
        logging.getLogger("somebody").warning("beware")
    assert capsys.readouterr().err == "news of 0\n[rank 0] warning: beware\n[rank 1] warning: beware\n"
    log_to_console(0, num_ranks=1)
    logging.getLogger("fedspec_dist.x").error("broken")
    assert capsys.readouterr().err == "error: broken\n"


def test_a_log_file_that_cannot_be_written_is_mentioned_once(
    root_logger: logging.Logger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root_logger.setLevel(logging.DEBUG)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "rank-3.log").symlink_to("/dev/full")
    log_to_file(RunFolder(tmp_path), 3)
    for _ in range(3):
        logging.getLogger("fedspec_dist.x").debug("something \udcff")
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"{tmp_path}/log/rank-3.log cannot be written; no more goes there"
    ]


def test_the_log_file_goes_on_after_a_restart(root_logger: logging.Logger, tmp_path: Path) -> None:
    root_logger.setLevel(logging.DEBUG)
    for text in ("first", "second \udcff"):
        log_to_file(RunFolder(tmp_path), 0)
        logging.getLogger("fedspec_dist.x").debug(text)
        root_logger.removeHandler(root_logger.handlers[-1])
    lines = (tmp_path / "log" / "rank-0.log").read_text().splitlines()
    assert [line.split("fedspec_dist.x: ")[1] for line in lines] == ["first", "second \\udcff"]


def test_git_state_outside_a_checkout_is_empty(tmp_path: Path) -> None:
    assert git_state(tmp_path / "nowhere") == {}
