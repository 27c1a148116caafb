"""The command line before anything runs: one message, exit code 2, no process group, no folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedspec_dist.config import load
from fedspec_dist.main import main

ROOT = Path(__file__).parents[1]


def _run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "fedspec_dist.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["local.learning_rate=1"],
            "config error: local.learning_rate: unknown key; allowed: algorithm, optimizer, lr",
        ),
        (["nosuch.yaml"], "config error: nosuch.yaml: cannot be read as a config"),
        ([str(ROOT)], "cannot be read as a config"),
        ([sys.executable], "cannot be read as a config"),
        (["a.yaml", "b.yaml"], "config error: one config file, got a.yaml, b.yaml; an override is key=value"),
        (["clients_per_round=21"], "config error: clients_per_round: got 21, but data.partition.clients is 20"),
    ],
)
def test_a_wrong_config_is_one_message_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    # With ranks that nobody else joins: had a process group been made, this would hang.
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = _run(*arguments, cwd=tmp_path, **ranks)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["fedspec_dist.main --print-config", "launch.status", "launch.submit --dry-run"])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_reason_to_fail(command: str, closed: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "one-01234567").mkdir(parents=True)
    (tmp_path / "runs" / "one-01234567" / "config.yaml").touch()
    started = ["sh", "-c", f"exec {sys.executable} -m {command} {closed}"]
    result = subprocess.run(started, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert result.returncode == 0


def test_what_is_wrong_on_one_host_is_said_by_its_rank() -> None:
    result = _run("plugins=[nosuch_module]", RANK="1")
    assert result.returncode == 2
    assert "config error: plugins: 'nosuch_module' could not be imported" in result.stderr


def test_other_ranks_leave_the_message_to_the_first() -> None:
    for variable in ("RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID"):
        result = _run("nosuch=1", **{variable: "1"})
        assert (result.returncode, result.stderr) == (2, "")


def test_other_ranks_leave_a_wrong_launch_to_the_first_where_it_is_the_same_for_all() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}  # and no job's id
    assert _run("rounds=1", **step).stderr == ""
    assert _run("rounds=1", **step).returncode == 2
    own = {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert "RANK is 3 but WORLD_SIZE is 2" in _run("rounds=1", **own).stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "error: LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "error: SLURM_PROCID, SLURM_LOCALID, SLURM_JOB_ID, SLURM_STEP_ID not set"),
        ({"SLURM_RESTART_COUNT": "x"}, "error: SLURM_RESTART_COUNT: got 'x'"),
    ],
)
def test_a_wrong_launch_is_one_message_and_exit_code_2(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    result = _run(f"output={tmp_path}/runs", **variables)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_printed_config_is_the_same_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["rounds=3", "server.aggregator={type: fipa, rank: 3}", "local.lr=1e-3", f"output={tmp_path}/a b ü"]
    assert main(["--print-config", *overrides]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "config.yaml"
    path.write_text(printed)
    assert load(path) == load(None, overrides)
    assert load(path).run_folder() == load(None, overrides).run_folder()
    assert yaml.safe_load(printed)["server"]["aggregator"]["rank"] == 3


def test_options_and_overrides_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds=2", "--print-config", "local.lr=0.5"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["rounds"], printed["local"]["lr"]) == (2, 0.5)


def test_a_plan_for_four_ranks_trains_nothing(tmp_path: Path) -> None:
    result = _run("--plan", "--ranks", "4", "rounds=3", cwd=tmp_path, COLUMNS="120")
    assert result.returncode == 0, result.stderr
    assert "first rounds on 4 rank(s)" in result.stdout
    assert "24,170" in result.stdout
    assert "run folder: runs/digits-specgrad-" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_data_that_is_missing_is_one_message() -> None:
    result = _run("--plan", "data.dataset=npz", "data.path=/nonexistent/x.npz")
    assert result.returncode == 1
    assert result.stderr.startswith("error: data.dataset: npz is in none of: /nonexistent/x.npz.")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("ranks", ["0", "-1", "x"])
def test_a_plan_for_no_ranks_is_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--plan", f"--ranks={ranks}"])
    assert raised.value.code == 2
    assert "allowed: a number from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "8"], "--ranks: is for --plan alone"),
        (["--ranks", "8", "--print-config"], "--ranks: is for --plan alone"),
        (["--plan", "--print-config"], "--print-config, --plan: give one of them"),
        (["--plan", "--fresh"], "--fresh, --accept-changes: with --plan and --print-config nothing runs"),
        (["--print-config", "--fresh"], "--fresh, --accept-changes: with --plan and --print-config nothing runs"),
        (["--print-config", "--debug"], "--debug: with --print-config nothing runs"),
    ],
)
def test_an_option_that_would_not_be_heeded_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_exists_is_one_whatever_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("runs/lr=0.1/x-abc/config.yaml")
    path.parent.mkdir(parents=True)
    path.write_text("rounds: 3\n")
    for folder in ("output=here", "rounds=5"):  # a folder of such a name is none
        Path(folder).mkdir()
    assert main([str(path), "output=here", "rounds=5", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["output"], printed["rounds"]) == ("here", 5)
    assert main([str(path), str(path), "--print-config"]) == 2
    assert "one config file, got runs/lr=0.1/x-abc/config.yaml, runs/lr" in capsys.readouterr().err
    assert main(["runs/lr=0.2/config.yaml"]) == 2
    assert "'runs/lr=0.2/config.yaml': is no file that exists" in capsys.readouterr().err


def test_debugging_is_one_process() -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = _run("--debug", **ranks)
    assert result.returncode == 2
    assert "--debug is one process" in result.stderr
