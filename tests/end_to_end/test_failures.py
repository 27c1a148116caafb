"""Whatever goes wrong: the job ends soon, with one message that names the culprit and says what to do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.cli import Job, metrics_of, results_of, rounds_done, run, run_folder, start

pytestmark = pytest.mark.slow

SMALL = [
    "data.dataset=synthetic",
    "data.shape=[1, 8, 8]",
    "data.num_classes=4",
    "data.num_train=400",
    "data.num_test=100",
    "data.partition.clients=8",
    "model={type: mlp, hidden: [16]}",
    "clients_per_round=4",
    "local.epochs=1",
    "local.batch_size=20",
    "rounds=4",
    "checkpoint.every=1",
]
# The same with half a second a round or so, for what has to happen during training.
LONG = [*SMALL, "model=cnn", "model.width=8", "local.epochs=8", "local.batch_size=5", "rounds=1000"]


def _tracebacks(output: str) -> int:
    """Of our ranks; torchrun shows one of its own whenever a rank ends with another code than 0."""
    return output.count("Traceback (most recent call last)") - output.count("errors.ChildFailedError")


def test_an_exception_in_one_rank_ends_the_job_with_its_traceback_once(tmp_path: Path) -> None:
    fault = {"FAULT": "raise", "FAULTY_RANK": "1"}
    ended = run(tmp_path, *SMALL, ranks=3, faulty=True, **fault).expect_failure(
        f"[rank 1] error: rank 1 on {socket.gethostname()}: Traceback", "RuntimeError: the fault that was asked for"
    )
    assert ended.seconds < 30
    assert ended.ours.count("RuntimeError: the fault that was asked for") == 1
    assert ended.output.splitlines()[-2].endswith("RuntimeError: the fault that was asked for"), "the last words of all"
    assert "rank-1.log" in {path.name for path in (run_folder(tmp_path) / "log").iterdir()}


def test_a_hung_rank_is_named_when_the_time_limit_is_over(tmp_path: Path) -> None:
    fault = {"FAULT": "hang", "FAULTY_RANK": "1"}
    ended = run(tmp_path, *SMALL, "runtime.timeout_s=6", ranks=3, faulty=True, timeout_s=90, **fault)
    ended.expect_failure("during gathering of client results", "hung, slow or killed: rank 1 on")
    assert "rank 2 on" not in ended.output.split("hung, slow or killed:")[1].splitlines()[0]


def test_a_frozen_rank_is_named_and_its_job_gone_in_half_a_minute(tmp_path: Path) -> None:
    with start(tmp_path, *LONG, ranks=2) as job:
        job.wait_until(lambda: rounds_done(tmp_path) >= 1, "round 1")
        os.kill(job.ranks()[1], signal.SIGSTOP)
        frozen = time.monotonic()
        job.wait(35).expect_failure(f"rank 1 on {socket.gethostname()} has not answered for 20 s")
        assert time.monotonic() - frozen < 30


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise", "RuntimeError: the fault that was asked for"),
        ("kill", f"rank 1 on {socket.gethostname()} has not answered for 4 s"),
        ("freeze", f"rank 1 on {socket.gethostname()} has not answered for 4 s"),
    ],
)
def test_a_backend_that_never_returns_hides_no_failure(fault: str, says: str, tmp_path: Path) -> None:
    """NCCL has no word for a peer that is gone."""
    variables = {"FAULT": fault, "FAULTY_RANK": "1", "SILENT": "1"}
    ended = run(tmp_path, *SMALL, ranks=2, faulty=True, **variables).expect_failure(says)
    assert ended.ours.count(says) == 1
    assert ended.seconds < 45  # most of which is the start of two ranks; the silence is made shorter


def test_a_rank_that_works_is_waited_for_beyond_the_time_limit(tmp_path: Path) -> None:
    fault = {"FAULT": "slow", "FAULTY_RANK": "1", "SLOW_S": "6"}
    ended = run(tmp_path, *SMALL, "runtime.timeout_s=2", ranks=2, faulty=True, **fault).expect(0)
    assert ended.seconds > 6


@pytest.mark.parametrize("ranks", [0, 2])
def test_sigterm_ends_a_long_computation_of_the_server(ranks: int, tmp_path: Path) -> None:
    with start(tmp_path, *SMALL, ranks=ranks, faulty=True, FAULT="aggregate", FAULTY_RANK="none") as job:
        job.wait_until(lambda: job.output.count("the aggregator begins") >= max(ranks, 1), "the server's part")
        job.process.send_signal(signal.SIGTERM)
        ended = job.wait(15).expect_failure("the server's part of round 1 still goes on: ending here")
        assert ranks or ended.code == 75


@pytest.mark.parametrize("moment_s", [0.0, 1.5])
def test_a_killed_launcher_leaves_no_ranks_and_the_next_one_at_its_port_is_undisturbed(
    moment_s: float, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    launcher = ("--master_port", port)
    with start(tmp_path, *LONG, "output=first", ranks=2, launcher=launcher) as job:
        job.wait_until(lambda: len(job.ranks()) == 2, "all ranks")
        time.sleep(moment_s)
        ranks = job.ranks().values()
        job.process.kill()
        job.process.wait()
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    run(tmp_path, *SMALL, "output=second", ranks=2, launcher=launcher).expect(0)


@pytest.mark.parametrize(("program", "imports"), [("main", "pydantic."), ("main", "torch."), ("doctor", "torch.")])
def test_ctrl_c_during_the_start_is_a_sentence(program: str, imports: str, tmp_path: Path) -> None:
    with Job([sys.executable, "-X", "importtime", "-m", f"fedspec_dist.{program}"], tmp_path, {}) as job:
        job.wait_until(lambda: imports in job.output, f"the import of {imports}")
        job.process.send_signal(signal.SIGINT)
        ended = job.wait(15).expect(130, "interrupted")
    assert _tracebacks(ended.output) == 0


def test_non_finite_updates_are_named_or_skipped(tmp_path: Path) -> None:
    broken = [*SMALL, "local.lr=1e30", "rounds=2", "eval.every=2"]
    ended = run(tmp_path, *broken, "output=raise", ranks=2)
    ended.expect_failure("returned a non-finite update in round 1 (rank ", "runtime.on_nonfinite=skip")
    assert ended.ours.count("non-finite update") == 1
    assert "runtime.on_nonfinite=skip" in ended.output.splitlines()[-2]
    assert _tracebacks(ended.output) == 0
    ended = run(tmp_path, *broken, "runtime.on_nonfinite=skip", "output=skip", ranks=2)
    ended.expect_failure("this run has diverged: nobody contributed to any of the 2 rounds: 8 updates were not finite")
    records = metrics_of(tmp_path, "skip")
    assert [record["clients_skipped"] for record in records] == [4, 4]
    assert [record["train_loss"] for record in records] == [None, None]


def test_a_model_that_diverges_leaves_strict_json(tmp_path: Path) -> None:
    # The parameters stay finite, what they make of an image does not: the metrics then hold null, never NaN.
    diverges = [*SMALL, "server.optimizer.lr=1e30", "local.lr=10.0", "runtime.on_nonfinite=skip"]
    run(tmp_path, *diverges).expect(3, "this run has diverged", "lower server.optimizer.lr")
    records = metrics_of(tmp_path)
    assert len(records) == 4
    assert records[-1]["test_loss"] is None


def test_a_step_of_the_server_that_is_not_finite_ends_the_run_whatever_is_skipped(tmp_path: Path) -> None:
    diverges = [*SMALL, "server.optimizer.lr=1e38", "local.lr=10.0", "runtime.on_nonfinite=skip", "checkpoint.every=1"]
    ended = run(tmp_path, *diverges, ranks=2)
    ended.expect_failure("the server's step of round 1 is not finite, though what the clients sent is: lower")
    assert ended.ours.count("is not finite") == 1
    assert not list(run_folder(tmp_path).glob("checkpoints/*"))


def _npz(path: Path, label: int = 1) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, size=(60, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 2
    labels[17] = label
    np.savez(path, train_images=images, train_labels=labels, test_images=images[:20], test_labels=labels[:20] % 2)


FROM_FILE = ["data={dataset: npz, path: d.npz, num_classes: 2, root: cache}", "data.partition={type: iid, clients: 4}"]
FROM_FILE += ["model={type: mlp, hidden: [8]}", "clients_per_round=2", "rounds=2", "local.epochs=1"]


def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    _npz(tmp_path / "d.npz", label=7)
    ended = run(tmp_path, *FROM_FILE, ranks=2).expect_failure("train label at index 17 is 7; allowed is 0..1")
    assert _tracebacks(ended.output) == 0


def test_a_truncated_data_file_is_named(tmp_path: Path) -> None:
    _npz(tmp_path / "d.npz")
    (tmp_path / "d.npz").write_bytes((tmp_path / "d.npz").read_bytes()[:2000])
    ended = run(tmp_path, *FROM_FILE, ranks=2).expect_failure(
        "data.path: cannot read d.npz", "write it again, or copy it whole"
    )
    assert _tracebacks(ended.output) == 0


def test_missing_data_is_one_message(tmp_path: Path) -> None:
    ended = run(tmp_path, "data.dataset=cifar10", "data.root=nowhere", "data.download=false", ranks=2)
    ended.expect_failure("data.dataset: cifar10 is in none of: nowhere")
    assert ended.ours.count("cifar10 is in none of") <= 2, "one message, and perhaps one of who heard of it"
    assert _tracebacks(ended.output) == 0


def test_killed_while_preparing_data(tmp_path: Path) -> None:
    _npz(tmp_path / "d.npz")
    leftover = tmp_path / "cache" / "prepared" / f".npz-0.tmp-{socket.gethostname()}-4194303"
    leftover.mkdir(parents=True)
    run(tmp_path, *FROM_FILE, "output=a").expect(0)
    assert not leftover.exists()
    (prepared,) = (tmp_path / "cache" / "prepared").iterdir()
    with (prepared / "train_inputs_0.npy").open("r+b") as file:
        file.truncate(100)
    run(tmp_path, *FROM_FILE, "output=b", ranks=2).expect(0)
    assert results_of(tmp_path, "a") == results_of(tmp_path, "b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; needs the right to mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path]).returncode:
        pytest.skip("cannot mount a small file system here: needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_full_disk_keeps_earlier_checkpoints_and_the_run_goes_on_when_there_is_space(
    ranks: int, small_disk: Path, tmp_path: Path
) -> None:
    # 90 kB a checkpoint.
    config = [*SMALL, "model={type: mlp, hidden: [200, 40]}", "checkpoint.keep=9", "rounds=5"]
    run(tmp_path, *config, "output=ample").expect(0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    ended = run(tmp_path, *config, "output=disk/runs", ranks=ranks)
    ended.expect_failure("No space left", "free space", "resume")
    assert _tracebacks(ended.output) == 0, ended.output
    (folder,) = (small_disk / "runs").iterdir()
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept
    assert all(name.startswith("round-") for name in kept)
    ballast.unlink()
    run(tmp_path, *config, "output=disk/runs", ranks=ranks).expect(0, f"resuming after round {int(kept[-1][6:])}")
    assert results_of(tmp_path, "disk/runs") == results_of(tmp_path, "ample")


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    with start(tmp_path, *LONG) as first:
        first.wait_until(lambda: rounds_done(tmp_path) >= 1, "round 1")
        ended = run(tmp_path, *LONG, "--fresh", ranks=2)
        ended.expect_failure(f"is in use by process {first.process.pid} on {socket.gethostname()}")
        assert _tracebacks(ended.output) == 0
        done = rounds_done(tmp_path)
        first.wait_until(lambda: rounds_done(tmp_path) > done, "more rounds of the first job")


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        ended = run(tmp_path, *SMALL, "runtime.timeout_s=5", **ranks)
    ended.expect(2, "could not join the other 1 ranks", f"to meet at localhost:{port}", "--standalone")
    assert _tracebacks(ended.output) == 0


def test_a_rank_that_never_comes_is_missed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for rank in ("0", "1"):
        ended = run(tmp_path, *SMALL, "runtime.timeout_s=4", **{**ranks, "RANK": rank})
        ended.expect(2, "could not join the other 1 ranks", "after 4 s", "runtime.timeout_s")
        assert ended.output.count("\n") < 5
        assert _tracebacks(ended.output) == 0


def test_debugging_shows_everything_in_one_process(tmp_path: Path) -> None:
    run(tmp_path, *SMALL, "output=debug", "--debug").expect(0, "round 4/4")
    run(tmp_path, *SMALL, "output=plain").expect(0)
    assert results_of(tmp_path, "debug") == results_of(tmp_path, "plain")
    run(tmp_path, *SMALL, "--debug", ranks=2).expect_failure("--debug is one process: start it with python -m")
