"""A run folder as nobody should leave it: pipes, folders, links and nonsense in place of each file of a run.

Whatever it is, the run ends in time, with one message or with its right result, and writes nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

from fedspec_dist import main
from fedspec_dist.runs.folder import OutputError, RunFolder, write_json
from fedspec_dist.runs.safe_files import read_json, read_object, read_objects
from fedspec_dist.runs.trackers.metrics import read
from launch.outcomes import read_outcome
from tests.rounds.jobs import TINY

ARGUMENTS = [*TINY, "rounds=3", "checkpoint.every=1"]
LIMIT_S = 20
SPARSE_BYTES = 8 * 2**30


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """What waits for the other end of a pipe waits for ever."""

    def too_late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still at it after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(LIMIT_S)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended well."""
    output = tmp_path_factory.mktemp("finished")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    assert main.main([*ARGUMENTS, f"output={output}"]) == 0
    root.handlers[:] = handlers
    root.setLevel(level)
    (folder,) = output.iterdir()
    return folder


def _link(path: Path) -> None:
    path.symlink_to(path.parents[len(path.parents) - 1] / _victim(path))


def _victim(path: Path) -> Path:
    """A file of somebody else's, outside the run folder."""
    return next(parent for parent in path.parents if parent.name == "here").parent / "victim"


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "empty file": lambda path: path.touch(),
    "link to a file": _link,
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep object": lambda path: path.write_text('{"round":' * 200_000),
    "list": lambda path: path.write_text("[1]"),
    "words": lambda path: path.write_text(
        '{"status": "finished", "round": "x", "files": {}, "format": [], "starts": {}}'
    ),
    "no files": lambda path: path.write_text(
        '{"status": [], "round": true, "files": {}, "format": 3, "config": 1, "identity": {}, "client_files": 0}'
    ),
    "numbers": lambda path: path.write_text(
        '{"round": 1e999, "rounds": -1, "status": 1, "accepted": 3, "identity": 7}'
    ),
    "digits": lambda path: path.write_text('{"round": ' + "9" * 5000 + "}"),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00" * 100),
    "sparse": _sparse,
}
PLACES = [
    ".lock",
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
    "model.safetensors",
    "checkpoints",
    "plugins",
    "log",
    "log/rank-0.log",
    "checkpoints/round-000003",
    "checkpoints/round-000003/state.json",
    "checkpoints/round-000003/model.safetensors",
    "checkpoints/round-000003/server.safetensors",
]


QUICK = ("pipe", "folder", "link to a file", "no files")


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(tuple(KINDS), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_ends_in_time_with_its_result_or_one_message(
    place: str, kinds: Sequence[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, model = read(finished / "metrics.jsonl"), (finished / "model.safetensors").read_bytes()
    accuracies = [record["test_accuracy"] for record in rounds]
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number) / "here" / finished.name
        shutil.copytree(finished, folder)
        victim = tmp_path / str(number) / "victim"
        victim.write_text("mine")
        if place != "summary.json":
            (folder / "summary.json").unlink()
        path = folder / place
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        KINDS[kind](path)
        code = main.main([*ARGUMENTS, f"output={folder.parent}"])
        said = capsys.readouterr().err
        assert code in (0, 1), kind
        assert "Traceback" not in said, f"{kind}: {said}"
        assert victim.read_text() == "mine", kind
        if code == 0:
            assert [record["test_accuracy"] for record in read(folder / "metrics.jsonl")] == accuracies, kind
            assert (folder / "model.safetensors").read_bytes() == model, kind
        else:
            assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, f"{kind}: {said}"
            assert len(said) < 4000, kind
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["summary.json", "metrics.jsonl", ".lock", "log"])
def test_a_sweep_reads_any_folder(place: str, kind: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here" / finished.name
    shutil.copytree(finished, folder)
    (tmp_path / "victim").touch()
    if place in (".lock", "log"):
        (folder / "summary.json").unlink()  # of a finished run nobody looks at these
    shutil.rmtree(folder / place) if place == "log" else (folder / place).unlink()
    KINDS[kind](folder / place)
    outcome = read_outcome(folder)
    assert isinstance(outcome.round, int)
    assert outcome.score("test_accuracy", 1) is None or outcome.state == "finished"


# ------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("kind", KINDS)
def test_readers_raise_nothing_else(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "here" / "file"
    path.parent.mkdir()
    KINDS[kind](path)
    assert isinstance(read_object(path), dict)
    assert all(isinstance(line, dict) for line in read_objects(path))
    with contextlib.suppress(OSError, ValueError):
        read_json(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"round": true}',
        '{"round": 0}',
        '{"round": -1}',
        '{"round": 2.0}',
        '{"round": 2, "test_accuracy": "high"}',
        '{"round": 2, "test_loss": [1]}',
        '{"round": 2, "seconds_round": {}}',
        '{"round": 2, "test_accuracy": true}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_nobodys_record_is_left_out(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"round": 1, "test_accuracy": null}}\n{line[:100_000]}\n{{"round": 3, "test_accuracy": 1}}\n')
    assert [record["round"] for record in read(path)] == [1, 3]


# ------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_of_a_run_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        assert main.main([*ARGUMENTS, f"output={tmp_path}"]) == 0
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "server.safetensors", "state.json", "metrics.jsonl"}
    assert {str(path): oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(
        map(str, files), oct(0o666 & ~umask)
    )


def test_temporary_names_cannot_be_foreseen_and_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / ".summary.json").symlink_to(victim)
    written: list[Path] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(Path(a)), real(a, b)))
    write_json(folder.summary, {"a": 1})
    write_json(folder.summary, {"a": 2})
    assert len(set(written)) == 2
    assert victim.read_text() == "mine"
    (folder.path / ".summary.json.tmp-0123").touch()
    folder.open(fresh=False)
    assert not (folder.path / ".summary.json.tmp-0123").exists()
    folder.close()


# ------------------------------------------------------------------------------------------ what goes away


def _begun(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.open(fresh=False)
    with folder.metrics.open("a") as file:
        folder.hold(folder.metrics, file)
    return folder


def _delete_and_start_again(path: Path) -> None:
    shutil.rmtree(path)
    other = RunFolder(path)
    other.open(fresh=False)
    other.metrics.touch()


GONE: dict[str, Callable[[Path], object]] = {
    "metrics deleted": lambda path: (path / "metrics.jsonl").unlink(),
    "metrics replaced": lambda path: os.replace(
        shutil.copy(path / "metrics.jsonl", path / "copy"), path / "metrics.jsonl"
    ),
    "metrics a link": lambda path: os.replace(_linked(path), path / "metrics.jsonl"),
    "lock deleted": lambda path: (path / ".lock").unlink(),
    "folder renamed": lambda path: path.rename(path.with_name("renamed")),
    "folder deleted": shutil.rmtree,
    "folder deleted and made": lambda path: (shutil.rmtree(path), path.mkdir()),
    "deleted and started again": _delete_and_start_again,
}


def _linked(path: Path) -> Path:
    (path / "moved").hardlink_to(path / "metrics.jsonl")
    (path / "link").symlink_to("moved")
    return path / "link"


@pytest.mark.parametrize("how", GONE)
def test_what_is_open_must_be_what_is_there(how: str, tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    folder.check()
    GONE[how](tmp_path / "run")
    with pytest.raises(OutputError, match=r"was deleted, moved or replaced while this run was at work.*--fresh"):
        folder.check()
    folder.close()


def test_writing_into_its_files_is_no_reason_to_end(tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    for path in (folder.metrics, tmp_path / "run" / "notes"):
        with path.open("a") as file:
            file.write(json.dumps({"round": 1}) + "\n")
    folder.check()
    folder.close()
