"""Submitting, with a program of our own in place of sbatch, and the messages for who types the command."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

import pytest

from fedspec_dist.config import Config, ConfigError, load
from launch import attempts, follow, queue, submit
from launch.queue import GONE, UNKNOWN, QueueState
from launch.record import Record, SubmissionFolder, write
from launch.start import SubmitError
from launch.submission import submit_array
from launch.submit import overrides_of

SBATCH = """\
cp "$1" "$SBATCH_COPY"; env > "$SBATCH_COPY.env"
echo "Submitted batch job 77"
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node: srun and sbatch are there, nothing is in the queue. Gives where sbatch puts what it gets."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"sbatch": SBATCH, "srun": "exit 1", "squeue": "exit 0"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    copy = tmp_path / "copy.sh"
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    monkeypatch.setenv("SBATCH_COPY", str(copy))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return copy


def in_queue(monkeypatch: pytest.MonkeyPatch, state: QueueState) -> None:
    monkeypatch.setattr(queue, "slurm_states", lambda jobs: dict.fromkeys(jobs, state))


def run_folder(output: str = "runs") -> Path:
    (found,) = (path for path in Path(output).absolute().iterdir() if not path.name.startswith("."))
    return found


def test_a_run_is_carried_on(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("old") / "digits-0123"
    (before / "checkpoints" / "round-000002").mkdir(parents=True)
    write(before / "config.yaml", load(None, ["rounds=2"]).to_yaml())
    assert submit.main(["--continue-from", str(before), "rounds=3", "--gpus-per-node", "2"]) == 0
    config = load(SubmissionFolder(run_folder()).config)
    assert config.init is not None
    assert (config.init.run, config.init.round, config.rounds) == (str(before), 2, 3)
    assert submit.main(["a.yaml", "--continue-from", str(before)]) == 2
    assert "--continue-from: takes the config of that run; leave out a.yaml" in capsys.readouterr().err


def test_a_submitted_run_has_everything_in_its_folder(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["rounds=3", "--gpus-per-node", "2", "--time", "12:00:00", "--extra", "mail-type=END"]) == 0
    folder = run_folder()
    files = SubmissionFolder(folder)
    record = files.record()
    assert record is not None
    assert (record.job_id, record.cluster, record.ranks, record.nodes) == ("77", "slurm", 2, 1)
    assert record.host == socket.gethostname()
    output = capsys.readouterr().out
    for part in ("77", str(folder), str(record.log()), "python -m launch.follow", "python -m launch.cancel"):
        assert part in output
    resolved = load(files.config)
    assert (resolved.rounds, resolved.cluster.gpus_per_node, resolved.cluster.time) == (3, 2, "12:00:00")
    assert resolved.run_folder().absolute() == folder
    assert "python -m fedspec_dist.main rounds=3 cluster.gpus_per_node=2" in files.command.read_text()
    assert isinstance(json.loads(files.git.read_text()), dict)
    assert "#SBATCH --time=720" in cluster.read_text()


def test_a_dry_run_shows_the_very_text_and_touches_nothing(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "rounds=3",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--mem-gb",
        "16",
        "--after",
        "12",
        "--partition",
        "a b",
    ]
    assert submit.main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not Path("runs").exists()
    assert not cluster.exists()
    assert submit.main(words) == 0
    (stamp,) = SubmissionFolder(run_folder()).jobs.iterdir()
    assert (
        shown.split("sbatch would get:\n\n")[1].rstrip().replace("DATE-TIME", stamp.name)
        == cluster.read_text().rstrip()
    )
    assert "ranks        4: 2 on each of 2 node(s), 2 GPU(s) a node" in shown
    assert f"run folder   {run_folder()}" in shown
    assert "#SBATCH --dependency=afterany:12" in shown


def test_a_dry_run_needs_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.main(["--dry-run"]) == 0
    assert "#SBATCH" in capsys.readouterr().out
    assert submit.main(["--dry-run", "--cluster", "local"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH" not in shown
    assert "time limit   none" in shown


def test_nothing_of_the_submitting_launcher_reaches_sbatch(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "3",
        "MASTER_PORT": "1",
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "9",
        "SLURM_CONF": "c",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert submit.main(["rounds=3"]) == 0
    got = {line.split("=")[0] for line in Path(f"{cluster}.env").read_text().splitlines()}
    assert not got & {"RANK", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_NTASKS", "SUBMITIT_EXECUTOR"}
    assert "SLURM_CONF" in got
    assert os.environ["RANK"] == "3"  # the shell of the caller is as it was


def test_outside_a_job_the_users_slurm_settings_stay(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "big")
    assert submit.main(["rounds=3"]) == 0
    assert "SLURM_CLUSTERS=big" in Path(f"{cluster}.env").read_text()


def test_the_shells_variables_do_not_overrule_what_is_typed(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To sbatch they count more than the lines of the script, where all options of submitit stand."""
    names = (
        "ACCOUNT",
        "PARTITION",
        "RESERVATION",
        "QOS",
        "MEM_PER_CPU",
        "CPUS_PER_GPU",
        "NO_REQUEUE",
        "TIMELIMIT",
        "WAIT",
    )
    for name in names:
        monkeypatch.setenv(f"SBATCH_{name}", "other")
    assert (
        submit.main(
            ["rounds=3", "--account", "mine", "--extra", "reservation=mine", "--mem-gb", "4", "--cpus-per-rank", "1"]
        )
        == 0
    )
    got = {line.split("=")[0] for line in Path(f"{cluster}.env").read_text().splitlines() if line.startswith("SBATCH_")}
    got.discard("SBATCH_COPY")  # of the program that stands for sbatch here
    assert got == {"SBATCH_PARTITION", "SBATCH_QOS"}  # not typed: the user's or the site's default


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rounds=0"], "rounds: got 0"),
        (["--nodes", "two"], "cluster.nodes: got 'two'"),
        (["--gpus-per-node", "-1"], "cluster.gpus_per_node: got -1"),
        (["--time", "soon"], "cluster.time: got 'soon'; must be a time such as 90m"),
        (["--extra", "=x"], "--extra: got '=x'; give key=value"),
        (["a.yaml", "b.yaml"], "one config file, got a.yaml, b.yaml; an override is key=value"),
        (["--after", "abc"], "--after: got 'abc'; allowed: the id of a job"),
        (["--after", ""], "--after: got ''; allowed: the id of a job"),
        (["--extra", "parsable"], "cluster.extra.parsable: with it sbatch tells no job id in its usual words"),
        (["--extra", "test-only"], "cluster.extra.test-only: with it sbatch tells no job id"),
        (["--cluster", "local", "--after", "3"], "--after: got '3', but --cluster local has no queue"),
        (["--cluster", "local", "--time", "2m"], "cluster.signal_before_s: got 120 with cluster.time 2m"),
        (["output=50%"], "cannot stand in the path of a submitted run"),
        (["--extra", "dependency=singleton", "--after", "3"], "cluster.extra.dependency: got one, and --after 3 is"),
        (["--extra", "output=x"], "cluster.extra.output: is set by launch.submit itself"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_happens(
    cluster: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(words) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()
    assert not cluster.exists()


def test_what_sbatch_says_is_passed_on(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin" / "sbatch").write_text('#!/bin/bash\necho "sbatch: error: invalid partition: x" >&2; exit 1\n')
    assert submit.main(["rounds=3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the job was refused: sbatch: error: invalid partition: x. Look at --dry-run;")
    assert error.count("invalid partition") == 1
    assert not list(Path("runs").iterdir()), "nothing was submitted, and nothing looks as if it had been"


def test_a_refusal_leaves_an_earlier_run_as_it_was(cluster: Path, tmp_path: Path) -> None:
    assert submit.main(["rounds=3"]) == 0
    write(run_folder() / "metrics.jsonl", "{}")
    before = {path for path in Path("runs").rglob("*") if path.is_file()}
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    assert submit.main(["rounds=3"]) == 1
    assert {path for path in Path("runs").rglob("*") if path.is_file()} == before


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.main([f"output={tmp_path}/runs"]) == 1
    assert (
        "there is no sbatch on this machine: submit from a login node, or use --cluster local"
        in capsys.readouterr().err
    )


def test_a_run_is_submitted_once(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["rounds=3"]) == 0
    in_queue(monkeypatch, QueueState("PENDING", "Resources"))
    assert submit.main(["rounds=3"]) == 1
    error = capsys.readouterr().err
    assert f"{run_folder()} is job 77 already (PENDING). Follow it with python -m launch.follow" in error
    in_queue(monkeypatch, QueueState(GONE))
    assert submit.main(["rounds=3"]) == 0
    assert len(list(SubmissionFolder(run_folder()).jobs.iterdir())) == 2


def test_a_job_of_unknown_state_may_still_run(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["rounds=3"]) == 0
    in_queue(monkeypatch, QueueState(UNKNOWN, "started on elsewhere"))
    assert submit.main(["rounds=3"]) == 1
    assert (
        "may still be job 77 (started on elsewhere). If you know that it has ended, delete" in capsys.readouterr().err
    )
    files = SubmissionFolder(run_folder())
    attempts.add_start(files.attempts, "77", 0, "elsewhere", 0)
    attempts.add_end(files.attempts, "77", 0, attempts.FAILED, "known")
    assert submit.main(["rounds=3"]) == 0


def test_a_finished_run_is_not_submitted_again(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = load(None, ["rounds=3"]).run_folder()
    write(folder / "summary.json", '{"status": "finished"}')
    write(folder / "checkpoints" / "round-000003" / "state.json", "{}")
    assert submit.main(["rounds=3"]) == 0
    assert "this run has already finished; --fresh starts it over" in capsys.readouterr().out
    assert not cluster.exists()
    write(folder / "submission" / "attempts.jsonl", "")
    assert submit.main(["rounds=3", "--fresh"]) == 0
    assert cluster.exists()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "submission"]
    assert (folder / "submission" / "attempts.jsonl").exists()


def test_a_new_submission_forgets_the_old_cancellation(cluster: Path) -> None:
    assert submit.main(["rounds=3"]) == 0
    files = SubmissionFolder(run_folder())
    write(files.cancelled, "77\n")
    assert submit.main(["rounds=3"]) == 0
    assert not files.cancelled.exists()


def test_a_folder_that_cannot_be_written(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert submit.main(["output=file"]) == 1
    assert (
        "cannot be written: Not a directory; choose another output=FOLDER, on a file system that the nodes"
        in capsys.readouterr().err
    )


def test_a_health_check_lies_beside_the_run(cluster: Path) -> None:
    assert submit.main(["rounds=3", "--doctor"]) == 0
    folder = run_folder()
    assert SubmissionFolder(folder).record() is None
    record = SubmissionFolder(folder / "doctor").record()
    assert record is not None
    assert record.job_id == "77"


def test_options_are_overrides() -> None:
    options = {
        "nodes": "2",
        "mem_gb": "1.5",
        "partition": "12",
        "time": "12:00:00",
        "extra": ["exclusive", "--comment=a=b"],
    }
    assert overrides_of(options) == [
        "cluster.nodes=2",
        "cluster.mem_gb=1.5",
        'cluster.time="12:00:00"',
        'cluster.partition="12"',
        "cluster.extra.exclusive=true",
        'cluster.extra.comment="a=b"',
    ]
    cluster = load(None, overrides_of(options)).cluster
    assert (cluster.nodes, cluster.partition, cluster.time) == (2, "12", "12:00:00")
    assert cluster.extra == {"exclusive": True, "comment": "a=b"}


def test_an_option_wins_over_the_file(cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("cluster: {nodes: 3, partition: slow}\n")
    assert submit.main([str(path), "--nodes", "2"]) == 0
    text = cluster.read_text()
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH --partition=slow" in text


def test_an_edit_after_the_submission_does_not_reach_the_job(cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("rounds: 3\n")
    assert submit.main([str(path)]) == 0
    path.write_text("rounds: 9\n")
    assert load(SubmissionFolder(run_folder()).config).rounds == 3


def test_waiting_gives_the_runs_exit_code(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "wait", lambda *arguments: follow.Outcome(True, "finished"))
    assert submit.main(["rounds=3", "--wait"]) == 0
    monkeypatch.setattr(follow, "wait", lambda *arguments: follow.Outcome(False, "failed"))
    assert submit.main(["rounds=4", "--follow"]) == 1


# ------------------------------------------------------------------------------------------ arrays


def entries(*seeds: int, **cluster: int) -> list[tuple[Config, list[str]]]:
    found = []
    for seed in seeds:
        arguments = [f"seed={seed}", *(f"cluster.{key}={value}" for key, value in cluster.items())]
        found.append((load(None, arguments), arguments))
    return found


def test_many_runs_are_one_array(cluster: Path) -> None:
    submissions = submit_array(entries(0, 1, 2, array_parallelism=2))
    assert [submission.job_id for submission in submissions] == ["77_0", "77_1", "77_2"]
    assert "#SBATCH --array=0-2%2" in cluster.read_text()
    folder = submissions[0].log.parent
    assert submissions[2].log == folder / "77_2_0_log.out"
    assert json.loads((folder / "runs.json").read_text())["runs"] == [str(entry.run_folder) for entry in submissions]
    for place, entry in enumerate(submissions):
        record = SubmissionFolder(entry.run_folder).record()
        assert record is not None
        assert record.job_id == f"77_{place}"
        assert (folder / f"77_{place}_submitted.pkl").exists()


def site(cluster: Path, array_size: int) -> list[str]:
    """A site whose arrays have so many places at most. Gives what each sbatch got, as it comes."""
    scripts = cluster.parent / "scripts"
    scripts.mkdir()
    for name, script in {
        "scontrol": f'echo "MaxArraySize            = {array_size}"',
        "sbatch": f'n=$(ls {scripts} | wc -l); [ -e {scripts}/full ] && exit 1; cp "$1" {scripts}/$n; '
        'echo "Submitted batch job $((77 + n))"',
    }.items():
        (cluster.parent / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (cluster.parent / "bin" / name).chmod(0o755)
    return scripts


def test_more_runs_than_an_array_of_the_site_can_have_are_several(cluster: Path) -> None:
    scripts = site(cluster, array_size=3)
    submissions = submit_array(entries(*range(7)))
    ids = ["77_0", "77_1", "77_2", "78_0", "78_1", "78_2", "79"]
    assert [submission.job_id for submission in submissions] == ids
    texts = [(scripts / str(number)).read_text() for number in range(3)]
    assert ["--array=0-2%3" in text for text in texts] == [True, True, False]
    assert not any("dependency" in text for text in texts), "without a limit they need not wait for each other"
    folders = list(dict.fromkeys(submission.log.parent for submission in submissions))
    places = [json.loads((folder / "runs.json").read_text())["runs"] for folder in folders]
    assert [path for part in places for path in part] == [str(submission.run_folder) for submission in submissions]


def test_arrays_of_a_limited_sweep_wait_for_each_other(cluster: Path) -> None:
    scripts = site(cluster, array_size=2)
    submit_array(entries(*range(5), array_parallelism=1))
    texts = [(scripts / str(number)).read_text() for number in range(3)]
    found = [[line for line in text.splitlines() if "dependency" in line] for text in texts]
    assert found == [[], ["#SBATCH --dependency=afterany:77"], ["#SBATCH --dependency=afterany:78"]]
    assert ["--array=0-1%1" in text for text in texts] == [True, True, False]


def test_what_a_site_took_before_it_refused_stays_and_the_rest_leaves_nothing(cluster: Path) -> None:
    scripts = site(cluster, array_size=2)
    sbatch = cluster.parent / "bin" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace('cp "$1"', '[ "$n" = 1 ] && exit 1; cp "$1"'))
    with pytest.raises(SubmitError, match="2 of 5 runs were submitted before that"):
        submit_array(entries(*range(5)))
    assert len(list(scripts.iterdir())) == 1
    folders = [path for path in Path("runs").iterdir() if path.name != ".arrays"]
    assert len(folders) == 2
    assert all(SubmissionFolder(folder).record() for folder in folders)
    assert len(list(Path("runs/.arrays").iterdir())) == 1


def test_a_refused_array_leaves_no_folders(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text('#!/bin/bash\necho "sbatch: error: Invalid job array" >&2; exit 1\n')
    with pytest.raises(SubmitError, match="Invalid job array"):
        submit_array(entries(*range(30)))
    assert not list(Path("runs").iterdir())


def test_a_run_that_somebody_started_by_hand_is_not_submitted_too(cluster: Path) -> None:
    folder = load(None, ["seed=1"]).run_folder()
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        lock.write(f"process 12 on {os.uname().nodename}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SubmitError, match=r"is at work already, in process 12 on .*; wait for it"):
            submit_array(entries(0, 1))
    assert not cluster.exists()


def test_an_array_of_one_is_a_job(cluster: Path) -> None:
    (entry,) = submit_array(entries(0))
    assert entry.job_id == "77"
    assert "--array" not in cluster.read_text()
    assert submit_array([]) == []


def test_runs_of_an_array_ask_for_the_same(cluster: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.nodes: differs between the runs of one job array \(1 and 2\)"):
        submit_array([*entries(0), *entries(1, nodes=2)])


def test_runs_of_an_array_are_different_runs(cluster: Path) -> None:
    with pytest.raises(ConfigError, match="two runs of the job array are the same run; let a seed or a setting differ"):
        submit_array(entries(1, 1))


def test_a_run_of_an_array_that_is_in_the_queue_is_refused(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record("5", "slurm", "x", 1, 1, "1h", "here", time.time())
    SubmissionFolder(load(None, ["seed=1"]).run_folder()).write_record(record)
    in_queue(monkeypatch, QueueState("RUNNING"))
    with pytest.raises(SubmitError, match="is job 5 already"):
        submit_array(entries(0, 1))
    assert not cluster.exists()


def test_a_run_that_diverged_is_not_submitted_again(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(load(None, ["rounds=3"]).run_folder() / "summary.json", '{"status": "diverged", "reason": "too large"}')
    assert submit.main(["rounds=3"]) == 3
    assert "this run has already diverged: too large. --fresh starts it over" in capsys.readouterr().err
    assert not cluster.exists()
    assert submit.main(["rounds=3", "--fresh"]) == 0
