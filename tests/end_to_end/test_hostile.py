"""Odd sizes, odd places and odd surroundings: runs that work, or end with one message that says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.cli import ROOT, metrics_of, results_of, run, run_folder

pytestmark = pytest.mark.slow

TINY = ["data.dataset=synthetic", "data.shape=[1, 8, 8]", "data.num_train=60", "data.num_test=20", "data.num_classes=3"]
TINY += ["data.partition={type: iid, clients: 4}", "model={type: mlp, hidden: [4]}", "clients_per_round=2"]
TINY += ["local.epochs=1", "local.batch_size=8", "rounds=2"]

ODD = {
    "one client": ["data.partition.clients=1", "clients_per_round=1", "server.aggregator=fedgh"],
    "batches of one, biases only": ["local.batch_size=1", "trainable=['*.bias']", "filter.ratio=0.9"],
    "one pixel, one test sample": [
        "data.shape=[1, 1, 1]",
        "data.num_classes=2",
        "data.num_test=1",
        "eval.batch_size=1",
        "server.aggregator={type: fipa, rank: 9}",
    ],
    "1x5x5 in a cnn": ["data.shape=[1, 5, 5]", "model={type: cnn, width: 2, norm: none}"],
    "a sample a client": ["data.partition={type: iid, clients: 60}", "clients_per_round=60", "server.aggregator=fedgh"],
    "clients without data": ["data.partition={type: dirichlet, alpha: 0.01, clients: 12, min_size: 0}"],
    "rank above parameters": ["server.aggregator={type: fipa, rank: 300, oversampling: 0, merge: tsqr}"],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_give_the_same_bits_on_one_and_two_ranks(name: str, tmp_path: Path) -> None:
    run(tmp_path, *TINY, *ODD[name], "output=one").expect(0)
    run(tmp_path, *TINY, *ODD[name], "output=two", ranks=2).expect(0)
    assert results_of(tmp_path, "one") == results_of(tmp_path, "two")


def test_more_clients_asked_for_than_have_data(tmp_path: Path) -> None:
    empty = ["data.partition={type: dirichlet, alpha: 0.01, clients: 30, min_size: 0}", "clients_per_round=30"]
    ended = run(tmp_path, *TINY, *empty).expect(1, "clients_per_round: got 30, but only ", "clients have data")
    assert "Traceback" not in ended.output


def test_a_path_with_spaces_and_letters_that_ascii_lacks(tmp_path: Path) -> None:
    output = "out put/模型 ü"
    run(tmp_path, *TINY, f"output={output}", PYTHONIOENCODING="ascii", LC_ALL="C").expect(
        0, "run folder: out put/\\u6a21"
    )
    assert len(metrics_of(tmp_path, output)) == 2


def test_its_own_config_runs_again_from_elsewhere(tmp_path: Path) -> None:
    run(tmp_path, *TINY).expect(0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(elsewhere, str(run_folder(tmp_path) / "config.yaml")).expect(0)
    assert results_of(elsewhere) == results_of(tmp_path)
    assert run_folder(elsewhere).name == run_folder(tmp_path).name


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run(tmp_path, *TINY, "output=file/runs").expect(1, "output: the run folder file/runs/", "cannot be written")
    assert "Traceback" not in ended.output


def test_a_user_without_home_name_or_cache(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root to become somebody else")
    place = Path("/tmp") / f"fedspec-nobody-{os.getpid()}"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from fedspec_dist.main import main; sys.exit(main())"
    command = ["setpriv", "--reuid=54321", "--clear-groups", sys.executable, "-c", code, *TINY, f"output={place}/runs"]
    try:
        environment = {"PATH": os.environ["PATH"]}
        probe = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fedspec_dist.config, torch"
        if subprocess.run([*command[:4], "-c", probe], env=environment, cwd=place, capture_output=True).returncode:
            pytest.skip("this installation is not readable by others")
        ended = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        command[-1] = "data.dataset=cifar10"
        ended = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=60)
        assert "data.root: got '~/.cache/fedspec_dist', but no such home directory is known" in ended.stderr
        assert "Traceback" not in ended.stderr
    finally:
        shutil.rmtree(place)


def test_warnings_as_errors(tmp_path: Path) -> None:
    run(tmp_path, *TINY, PYTHONWARNINGS="error::DeprecationWarning,error::ResourceWarning").expect(0)


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    command = f"{sys.executable} -m fedspec_dist.main rounds=5 2>errors | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, timeout=60).returncode
    assert code == 0, (tmp_path / "errors").read_text()
    assert len(metrics_of(tmp_path)) == 5
    assert "BrokenPipe" not in (tmp_path / "errors").read_text()


@pytest.mark.skipif(not shutil.which("script"), reason="needs script(1) for a terminal")
def test_a_terminal_gets_a_live_line_and_its_cursor_back(tmp_path: Path) -> None:
    command = f"{sys.executable} -m fedspec_dist.main {' '.join(repr(item) for item in TINY)}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    ended = subprocess.run(
        ["script", "-qec", command, "typescript"], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout
    assert b"2/2" in ended.stdout
    assert ended.stdout.rindex(b"\x1b[?25h") > ended.stdout.rindex(b"\x1b[?25l")
