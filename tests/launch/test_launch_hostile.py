"""What lies in run folders may be anybody's: every command passes over what is none of its files, and never hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import aftermath, attempts, cancel, collect, follow, queue, status
from launch.axes import load_sweep
from launch.outcomes import Outcomes, read_outcome
from launch.queue import GONE, QueueState
from launch.record import Record, SubmissionFolder, run_of, write, write_runs
from launch.study import Study

ROOT = Path(__file__).parents[2]
DEEP = "[" * 100_000


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00" * 50)


def _loop(path: Path) -> None:
    path.symlink_to(path)


DAMAGE = {
    "a FIFO": _fifo,
    "a folder": _folder,
    "a link to itself": _loop,
    "deep JSON": _text(DEEP),
    "deep lines": _text(f"{DEEP}\n" * 2),
    "another shape": _text('[{"job_id": []}]'),
    "a number": _text("8"),
    "values of other types": _text(
        '{"job_id": [7], "cluster": {}, "folder": 1, "ranks": "two", "status": [], "runs": {"0": 1}, "event": 5, '
        '"time": {}, "attempt": 1, "round": "x", "outcome": 3, "seconds_round": [], "test_accuracy": {}}'
    ),
    "null": _text("null"),
    "binary": _bytes,
    "empty": _text(""),
}
FILES = [
    "submission/job.json",
    "submission/attempts.jsonl",
    "submission/cancelled",
    "submission/config.yaml",
    "submission/jobs/one/runs.json",
    "submission/jobs/one/7_0_log.out",
    "events.jsonl",
    "summary.json",
    "config.yaml",
    ".lock",
    "checkpoints",
]


@pytest.fixture
def _in_time() -> Iterator[None]:
    """A reader that waits for a FIFO waits for ever."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError("a reader hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_run(tmp_path: Path) -> SubmissionFolder:
    files = SubmissionFolder(tmp_path / "runs" / "digits-0123")
    folder = files.jobs / "one"
    write(files.config, "rounds: 9\n")
    write_runs(folder, [files.run_folder])
    files.write_record(Record("7", "slurm", str(folder), 1, 1, "1h", socket.gethostname(), time.time()))
    attempts.add_start(files.attempts, "7", 0, "node1", 0)
    write(folder / "7_0_log.out", "round 1/9\n")
    write(files.run_folder / "events.jsonl", "")
    return files


@pytest.mark.usefixtures("_in_time")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_every_reader_passes_over_what_is_no_file_of_ours(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = a_run(tmp_path)
    path = files.run_folder / name
    path.unlink(missing_ok=True)
    DAMAGE[damage](path)
    monkeypatch.setattr(queue, "slurm_states", lambda jobs: dict.fromkeys(jobs, QueueState(GONE)))
    monkeypatch.setattr(queue, "slurm_state", lambda job: QueueState(GONE))
    monkeypatch.setattr(queue, "job_fields", lambda job: {})
    assert status.main([str(files.run_folder)]) == 0
    assert read_outcome(files.run_folder).state in ("pending", "unfinished", "failed", "running")
    if files.record() is not None:
        assert not follow.wait(files.run_folder, poll_s=0.01, settle_s=0.02).finished
        assert "has already ended" in cancel.cancel(files.run_folder)
    text, again = aftermath.settle(files, files.jobs / "one", "7", 1, False, 0)
    assert "failed with exit code 1" in text
    assert not again
    study = Study(load_sweep(_sweep(tmp_path), []), Outcomes())
    assert collect.summary(study)


def _sweep(folder: Path) -> Path:
    path = folder / "study.yaml"
    path.write_text(f"overrides: ['output={folder}/runs']\nseeds: [1]\n")
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "--me"},
        {"job_id": "-1"},
        {"job_id": "7; true"},
        {"job_id": "../self"},
        {"job_id": 7.5},
        {"ranks": 10**12},
        {"ranks": -1},
        {"ranks": True},
        {"folder": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_that_is_not_of_our_making_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    files = a_run(tmp_path)
    files.job.write_text(json.dumps(json.loads(files.job.read_text()) | change))
    assert files.record() is None


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    files = a_run(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("job.json", "cancelled", "config.yaml", "attempts.jsonl"):
        (files.path / f".{name}").symlink_to(victim)  # the temporary name of old, which could be foreseen
        (files.path / name).unlink(missing_ok=True)
        (files.path / name).symlink_to(victim)
    files.write_record(Record("8", "slurm", "x", 1, 1, "1h", "here", 0.0))
    write(files.cancelled, "8\n")
    write(files.config, "rounds: 1\n")
    with pytest.raises(OSError, match="link"):
        attempts.add_start(files.attempts, "8", 0, "here", 0)
    assert victim.read_text() == "precious"
    assert not files.cancelled.is_symlink()


def test_a_job_that_does_not_know_its_run_says_so(tmp_path: Path) -> None:
    for content in ("{}", '{"runs": []}', '{"runs": [3]}', DEEP):
        (tmp_path / "runs.json").write_text(content)
        with pytest.raises(ValueError, match="does not say which run place 0 of this job is; submit the run again"):
            run_of(tmp_path, 0)


# ------------------------------------------------------------------------------------------ the current folder, a pipe

SHADOWS = ("launch.py", "fedspec_dist.py", "queue.py", "submitit.py")


def commands_of(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`fedspec`, as pip installs it, in a folder whose modules have the names of ours."""
    program = folder / "bin" / "fedspec"
    program.parent.mkdir()
    program.write_text("import sys\nfrom launch.__main__ import main\nsys.exit(main())\n")
    work = folder / "work"
    work.mkdir()
    for name in SHADOWS:
        (work / name).write_text("raise SystemExit('the wrong module was imported')\n")
    (work / "mine.py").write_text("")

    def call(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(program), *words],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )

    return call


def test_the_users_files_do_not_get_in_the_way_of_the_commands(tmp_path: Path) -> None:
    fedspec = commands_of(tmp_path)
    for words in (["--help"], ["submit", "--dry-run", "plugins=[mine]"], ["run", "--print-config", "plugins=[mine]"]):
        done = fedspec(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    done = fedspec("status")
    assert "submit one with fedspec submit" in done.stderr
    assert fedspec("nosuch").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks into the current folder first in any case")
def test_the_users_files_do_not_get_in_the_way_of_jobs_and_sweeps(tmp_path: Path) -> None:
    fedspec = commands_of(tmp_path)
    tiny = ["rounds=1", "local.epochs=1", "plugins=[mine]"]
    done = fedspec("submit", *tiny, "--cluster", "local", "--ranks-per-node", "2", "--wait")
    assert done.returncode == 0, done.stderr
    (tmp_path / "work" / "study.yaml").write_text(f"overrides: {json.dumps(tiny)}\nseeds: [1]\n")
    for ranks in ("2",):
        shutil.rmtree(tmp_path / "work" / "runs")
        done = fedspec("sweep", "study.yaml", "--ranks", ranks, "--max-ranks", "2")
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["launch.sweep", "study.yaml", "--dry-run"],
        ["launch.sweep", "study.yaml", "--status"],
        ["launch.submit", "--dry-run"],
        ["launch.templates", "single_node"],
        ["launch.status"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_command_of_which_nobody_reads_on_ends_quietly(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(f"seeds: {list(range(300))}\n")
    a_run(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    assert done.stderr == ""
    assert done.returncode in (0, 1, 128 + signal.SIGPIPE)
