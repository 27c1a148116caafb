"""What the commands of launch/ do with words that name a file, and with options that nothing would heed."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedspec_dist.doctor
from fedspec_dist.config import load, split_arguments
from launch import axes, submit, sweep, templates


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config in a folder whose name could be an override, from the folder above."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs/lr=0.1/x-abc/config.yaml")
    path.parent.mkdir(parents=True)
    path.write_text("rounds: 3\nname: of-the-file\ncluster: {ranks_per_node: 1}\n")
    return str(path)


def test_submit_takes_a_file_with_an_equals_sign(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main([config, "output=runs/lr=0.1", "--dry-run"]) == 0
    assert "runs/lr=0.1/of-the-file-" in capsys.readouterr().out


def test_a_sweep_takes_one_and_so_do_its_runs(config: str, tmp_path: Path) -> None:
    Path("study=1.yaml").write_text(f"config: {config}\naxes: {{grid: {{local.lr: [0.1, 0.2]}}}}\n")
    runs = axes.load_sweep(Path("study=1.yaml"), ["local.epochs=2"]).first_runs()
    assert [(run.config.name, run.config.local.lr) for run in runs] == [("of-the-file", 0.1), ("of-the-file", 0.2)]
    assert all(load(*split_arguments(run.arguments)) == run.config for run in runs)
    assert sweep.main(["study=1.yaml", "local.epochs=2", "--dry-run"]) == 0


def test_templates_take_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert templates.main(["single_node", config, "rounds=4"]) == 0
    script = capsys.readouterr().out
    assert config in script
    assert "of-the-file" in script


def test_the_doctor_takes_one(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(fedspec_dist.doctor, "_examine", lambda found: seen.append(found.name) or 0)
    assert fedspec_dist.doctor.main([config]) == 0
    assert seen == ["of-the-file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "local", "--partition", "gpu"], "--partition: has no effect with --cluster local"),
        (["--cluster", "local", "--extra", "a=b"], "--extra: has no effect with --cluster local"),
        (["--cluster", "local", "--mem-gb", "4"], "--mem-gb: has no effect with --cluster local"),
        (["--cluster", "debug", "--time", "1h"], "--time: has no effect with --cluster debug"),
        (["--cluster", "debug", "--follow"], "--follow: has no effect with --cluster debug"),
        (["--cluster", "debug", "--wait"], "--wait: has no effect with --cluster debug"),
        (["--dry-run", "--follow"], "--follow: has no effect with --cluster slurm --dry-run"),
        (["--dry-run", "--fresh"], "--fresh: has no effect with --cluster slurm --dry-run"),
    ],
)
def test_an_option_of_submit_that_would_not_be_heeded_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert submit.main(["rounds=3", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wait"], "--wait: is for --cluster slurm"),
        (["--wait", "--cluster", "slurm", "--status"], "--wait: is for --cluster slurm and runs that are submitted"),
        (["--status", "--ranks", "2"], "--ranks, --max-ranks: have no effect with --status"),
        (["--collect", "a.csv", "--max-ranks", "2"], "--ranks, --max-ranks: have no effect with --status"),
        (["--cluster", "slurm", "--ranks", "2"], "--ranks, --max-ranks: are for --cluster local"),
    ],
)
def test_an_option_of_sweep_that_would_not_be_heeded_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text("overrides: [rounds=3]\n")
    assert sweep.main(["study.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]
