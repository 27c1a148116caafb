"""The local pool and the loop around it, with short programs in place of runs."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedspec_dist.runs.folder import RunFolder, write_json
from launch import drive, pool
from launch.axes import Run, load_sweep
from launch.outcomes import DIVERGED, Outcome, Outcomes
from launch.pool import Pool, command, environment, least_used, visible_gpus
from launch.start import SubmitError
from launch.study import Study
from launch.submission import Submission


def study_of(folder: Path, text: str = "axes: {grid: {rounds: [1, 2, 3]}}") -> Study:
    path = folder / "study.yaml"
    path.write_text(text)
    return Study(load_sweep(path, [f"output={folder / 'runs'}"]), Outcomes())


def program(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Runs are this text, with FOLDER and ROUNDS set."""

    def replaced(run: Run, ranks: int) -> list[str]:
        return [sys.executable, "-c", f"FOLDER, ROUNDS = {str(run.folder)!r}, {run.config.rounds}\n{text}"]

    monkeypatch.setattr(pool, "command", replaced)


FINISH = """
import json, pathlib
value = 0.1 * ROUNDS
metrics = {"round": ROUNDS, "test_accuracy": value, "val_accuracy": value}
pathlib.Path(FOLDER, "metrics.jsonl").write_text(json.dumps(metrics))
pathlib.Path(FOLDER, "summary.json").write_text(json.dumps({"status": "finished"}))
"""
SLEEP = "import time\nprint('working', flush=True)\ntime.sleep(100)"


# ------------------------------------------------------------------------------------------ pure parts


def test_one_rank_is_plain_python_and_more_are_torchrun(tmp_path: Path) -> None:
    run = study_of(tmp_path).waiting()[0]
    plain = [sys.executable, "-m", "fedspec_dist.main", f"output={tmp_path / 'runs'}", "rounds=1"]
    assert command(run, 1) == plain
    assert command(run, 3)[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    assert command(run, 3)[6:] == plain[1:]


def test_a_run_inherits_nothing_of_a_surrounding_job() -> None:
    outer = {
        "PATH": "/bin",
        "RANK": "3",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_JOB_ID": "7",
        "SUBMITIT_LOCAL_NTASKS": "2",
    }
    found = environment(outer, 2, None)
    assert (Path(found.pop("PYTHONPATH")) / "launch" / "pool.py").exists(), "this code is found from any folder"
    assert found == {"PATH": "/bin", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "2", "PYTHONSAFEPATH": "1"}
    found = environment({"OMP_NUM_THREADS": "5"}, 2, ["1", "3"])
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("5", "1,3")


def test_gpus_are_those_that_are_visible_and_are_shared_evenly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}) == ["2", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: A'\necho '  MIG 1g'\necho 'GPU 1: B'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus({}) == ["0", "1"]
    assert least_used(["0", "1", "2"], ["0", "1", "0"], 2) == ["2", "1"]
    assert least_used(["0"], ["0"], 2) == ["0"]


# ------------------------------------------------------------------------------------------ processes


def test_runs_get_their_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, "import os\nprint('on', os.environ['CUDA_VISIBLE_DEVICES'])\n" + FINISH)
    working = Pool(4, 2, ["0", "1", "2", "3"])
    runs = study_of(tmp_path).waiting()[:2]
    for run in runs:
        working.start(run)
    assert not working.has_room()
    assert working.wait(20)
    assert [(run.folder / "log/console.log").read_text() for run in runs] == ["on 0,1\n", "on 2,3\n"]


def test_all_runs_are_done_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, FINISH)
    study = study_of(tmp_path)
    assert drive.run_here(study, 1, 2) == 0
    assert study.waiting() == []
    said = capsys.readouterr().out
    assert "3 runs to do, 2 at once" in said
    assert "finished: digits-specgrad rounds=3 seed=0: test_accuracy 0.3000" in said
    assert "| digits-specgrad rounds=3 | 0.3000 |" in (tmp_path / "runs" / "study.md").read_text()
    assert drive.run_here(study, 1, 2) == 0
    assert "0 runs to do" in capsys.readouterr().out


def test_a_failed_run_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, "import sys\nif ROUNDS == 2: sys.exit('the disk is gone')\n" + FINISH)
    study = study_of(tmp_path)
    assert drive.run_here(study, 1, 1) == drive.EXIT_FAILED
    said = capsys.readouterr().out
    assert "exit code 1: the disk is gone" in said
    assert str(study.waiting()[0].folder / "log/console.log") in said
    assert [run.config.rounds for run in study.waiting()] == [2]


def test_more_ranks_than_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--ranks: got 3, more than the 2 at once; give --max-ranks 3 to allow it"):
        drive.run_here(study_of(tmp_path), 3, 2)


def test_a_run_of_another_job_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, FINISH)
    study = study_of(tmp_path)
    queued = study.waiting()[1].folder
    monkeypatch.setattr(drive, "queue_states", lambda runs: {queued: "queued"})
    assert drive.run_here(study, 1, 2) == 0
    assert not queued.exists()
    assert (
        f"left to the jobs that are at work on them or queued: 1 runs, for example {queued}" in capsys.readouterr().out
    )


def test_a_run_that_another_sweep_has_begun_meanwhile_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, FINISH)
    study = study_of(tmp_path)
    first, second, third = study.waiting()
    read = study.outcome
    monkeypatch.setattr(
        study, "outcome", lambda run: Outcome("running") if run == second and read(first).complete else read(run)
    )
    assert drive.run_here(study, 1, 1) == 0
    assert not second.folder.exists()
    assert read(third).complete


SWEEPING = """
import sys
from pathlib import Path
from launch import drive, pool
from launch.axes import load_sweep
from launch.outcomes import Outcomes
from launch.study import Study
body = Path(sys.argv[2]).read_text()
pool.command = lambda run, ranks: [sys.executable, "-c", body]
sys.exit(drive.run_here(Study(load_sweep(Path(sys.argv[1])), Outcomes()), 1, 2))
"""


def start_sweep(folder: Path, body: str) -> subprocess.Popen[str]:
    """A sweep in a process of its own, two of its runs at work: each writes its pid, and has a child."""
    (folder / "study.yaml").write_text(f"overrides: [output={folder / 'runs'}]\naxes: {{grid: {{rounds: [1, 2, 3]}}}}")
    (folder / "body.py").write_text(
        f"import os, subprocess, sys\nchild = subprocess.Popen(['sleep', '200'], start_new_session=True)\n"
        f"open({str(folder)!r} + f'/pid-{{os.getpid()}}', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n{body}"
    )
    arguments = [sys.executable, "-c", SWEEPING, str(folder / "study.yaml"), str(folder / "body.py")]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while len(pids(folder)) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.1)
    return process


def pids(folder: Path) -> list[int]:
    return [int(word) for path in folder.glob("pid-*") for word in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(processes: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


# As torchrun does: ends its child and itself.
POLITE = """
import signal, time
def stop(*_):
    child.terminate()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
time.sleep(100)
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_stops_the_runs_and_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = start_sweep(tmp_path, POLITE)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == drive.EXIT_STOPPED
    assert "stopping 2 runs; a second signal kills them" in said
    assert gone(pids(tmp_path), 5)
    assert len(pids(tmp_path)) == 4, "the third run was not started"


def test_ctrl_c_at_the_terminal_is_for_the_sweep_which_tells_the_runs(tmp_path: Path) -> None:
    noted = f"open({str(tmp_path)!r} + '/interrupted', 'w')"
    process = start_sweep(tmp_path, f"import signal\nsignal.signal(signal.SIGINT, lambda *_: {noted})\n{POLITE}")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == drive.EXIT_STOPPED
    assert gone(pids(tmp_path), 5)
    assert not (tmp_path / "interrupted").exists()


def test_a_second_signal_kills_runs_that_do_not_stop_with_all_their_children(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, DEAF)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == drive.EXIT_STOPPED
    assert gone(pids(tmp_path), 5)


def test_a_killed_sweep_takes_its_runs_with_it(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, POLITE)
    process.kill()
    process.communicate(timeout=20)
    assert gone(pids(tmp_path))


# ------------------------------------------------------------------------------------------ SLURM, without one


class Cluster:
    """Takes submissions; what was submitted is in the queue until `end` is called."""

    def __init__(self) -> None:
        self.arrays: list[list[str]] = []
        self.queued: dict[Path, str] = {}

    def submit(self, entries: list[tuple[object, list[str]]], name: str) -> list[Submission]:
        self.arrays.append([" ".join(arguments) for _, arguments in entries])
        folders = [config.run_folder() for config, _ in entries]  # type: ignore[attr-defined]
        self.queued |= dict.fromkeys(folders, "queued")
        return [
            Submission(folder, "slurm", f"{len(self.arrays)}_{n}", folder / "log") for n, folder in enumerate(folders)
        ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(drive, "queue_states", lambda runs: dict(cluster.queued))
    monkeypatch.setattr(drive, "_QUEUE_POLL_S", 0.01)
    monkeypatch.setattr(drive, "_SETTLE_S", 0.1)
    return cluster


def test_all_runs_are_one_job_array_and_are_not_submitted_twice(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path)
    assert drive.run_on_slurm(study, wait=False, submit=cluster.submit) == 0
    assert [len(array) for array in cluster.arrays] == [3]
    assert "job 1: 3 runs" in capsys.readouterr().out
    assert drive.run_on_slurm(study, wait=False, submit=cluster.submit) == 0
    assert len(cluster.arrays) == 1
    assert "3 runs were in the queue before" in capsys.readouterr().out


def test_waiting_goes_on_from_the_tuning_to_the_seeds(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "tune: {over: {local.lr: [0.1, 0.2]}, expand: true, budget: 9}\nseeds: [1, 2]"
    study = study_of(tmp_path, text)

    def queue_states(runs: list[Run]) -> dict[Path, str]:
        queued, cluster.queued = cluster.queued, {}
        for run in runs if queued else []:
            run.folder.mkdir(parents=True)
            scope = {"FOLDER": str(run.folder), "ROUNDS": 1}
            exec(FINISH.replace("0.1 * ROUNDS", str(-abs(run.config.local.lr - 0.2))), scope)
        return {}

    monkeypatch.setattr(drive, "queue_states", queue_states)
    assert drive.run_on_slurm(study, wait=True, submit=cluster.submit) == 0
    assert [len(array) for array in cluster.arrays] == [2, 1, 2]
    assert cluster.arrays[1][0].endswith("local.lr=0.4 seed=0 data.holdout=0.1")
    assert cluster.arrays[2][1].endswith("local.lr=0.2 seed=2")


def test_runs_that_came_to_nothing_are_told_and_not_submitted_again(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drive, "queue_states", lambda runs: {})
    study = study_of(tmp_path)
    assert drive.run_on_slurm(study, wait=True, submit=cluster.submit) == drive.EXIT_FAILED
    assert len(cluster.arrays) == 1
    assert "pending: digits-specgrad rounds=1 seed=0: after 0 of 1 rounds: see python -m" in capsys.readouterr().out


def test_results_that_are_seen_after_the_end_of_their_job_count(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(tmp_path, "seeds: [1]")
    monkeypatch.setattr(drive, "_SETTLE_S", 10.0)
    monkeypatch.setattr(drive, "queue_states", lambda runs: {})

    def listdir(folder: Path) -> None:  # what makes NFS look again
        folder.mkdir(parents=True, exist_ok=True)
        exec(FINISH, {"FOLDER": str(folder), "ROUNDS": 1})

    monkeypatch.setattr(drive.os, "listdir", listdir)
    assert drive.run_on_slurm(study, wait=True, submit=cluster.submit) == 0


def test_a_lock_that_is_released_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, "seeds: [1]")
    states = ["running", "running", "unfinished"]
    monkeypatch.setattr(study, "outcome", lambda run: Outcome(states.pop(0) if len(states) > 1 else states[0]))
    assert drive._report(study, study.known()[0], -9)
    assert capsys.readouterr().out.startswith("unfinished: digits-specgrad seed=1")


def test_a_method_without_any_result_is_an_error(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, "tune: {over: {local.lr: [0.1, 0.2]}, expand: false}\nseeds: [1]")
    monkeypatch.setattr(drive, "queue_states", lambda runs: {})
    monkeypatch.setattr(study, "outcome", lambda run: Outcome(DIVERGED))
    assert drive.run_on_slurm(study, wait=True, submit=cluster.submit) == drive.EXIT_FAILED
    assert "no point of its grid has a finite result, so its seeds are not run" in capsys.readouterr().out


def test_the_plan_for_slurm_has_the_text_for_sbatch(tmp_path: Path) -> None:
    study = study_of(tmp_path, "overrides: [cluster.array_parallelism=2, cluster.time=90m]\nseeds: [1, 2, 3]")
    text = drive.slurm_plan(study)
    assert "#SBATCH --array=0-2%2" in text
    assert "#SBATCH --job-name=study" in text


# ------------------------------------------------------------------------------------------ the command


def test_the_command_shows_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launch.sweep import main

    study_of(tmp_path)
    path = str(tmp_path / "study.yaml")
    assert main([path, f"output={tmp_path / 'a folder'}", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"-m fedspec_dist.main 'output={tmp_path / 'a folder'}' rounds=1" in said
    assert said.endswith("# 3 of 3 runs to do\n")
    assert main([path, "--collect", str(tmp_path / "x.md")]) == 2
    assert "the means go to an .md beside it" in capsys.readouterr().err
    assert main([path, "--cluster", "slurm", "--ranks", "2"]) == 2
    assert "--ranks, --max-ranks: are for --cluster local" in capsys.readouterr().err
    assert main([path, "roundz=1"]) == 2
    assert "config error: " in capsys.readouterr().err
    assert main([path, f"output={tmp_path}", "--collect", str(tmp_path / "sub" / "x.csv")]) == 0
    assert (tmp_path / "sub" / "x.csv").read_text().count("pending") == 3
    assert "0/1" in (tmp_path / "sub" / "x.md").read_text()


def test_ranks_are_counted_from_one() -> None:
    from launch.sweep import _count

    with pytest.raises(argparse.ArgumentTypeError, match="got '0'; allowed: a number from 1"):
        _count("0")


def test_a_login_node_needs_no_torch() -> None:
    code = "import sys, launch.sweep; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


# ------------------------------------------------------------------------------------------ starting over


TUNED = "seeds: [1, 2]\ntune: {over: {local.lr: [0.1, 0.2]}, seed: 0}\noverrides: [rounds=3]"


def test_a_fresh_sweep_starts_every_run_over_once_also_those_that_the_tuning_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, FINISH)
    assert drive.run_here(study_of(tmp_path, TUNED), 1, 2) == 0
    folders = sorted((tmp_path / "runs").glob("*-*"))
    assert len(folders) == 4
    for folder in folders:
        (folder / "of an earlier run").touch()
    study = Study(study_of(tmp_path, TUNED).sweep, Outcomes(fresh=True))
    assert len(study.waiting()) == 2, "the seeds are not known before the tuning has been done again"
    assert all((folder / "of an earlier run").exists() for folder in folders), "asking deletes nothing"
    assert drive.run_here(study, 1, 2) == 0
    assert not list((tmp_path / "runs").rglob("of an earlier run"))
    assert sorted((tmp_path / "runs").glob("*-*")) == folders
    assert study_of(tmp_path, TUNED).waiting() == []


def test_a_fresh_sweep_leaves_a_run_that_is_at_work_alone(tmp_path: Path) -> None:
    study = Study(study_of(tmp_path).sweep, Outcomes(fresh=True))
    run = study.waiting()[0]
    at_work = RunFolder(run.folder)
    at_work.open(fresh=False)
    write_json(at_work.summary, {"status": "finished"})
    with pytest.raises(SubmitError, match="is in use by process"):
        study.start_over(run)
    assert at_work.summary.exists()
    at_work.close()


def test_runs_are_told_that_changes_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, FINISH + "import sys; pathlib.Path(FOLDER, 'told').write_text(' '.join(sys.argv[1:]))")
    assert drive.run_here(study_of(tmp_path), 1, 2, accept_changes=True) == 0
    assert [path.read_text() for path in (tmp_path / "runs").rglob("told")] == ["--accept-changes"] * 3
