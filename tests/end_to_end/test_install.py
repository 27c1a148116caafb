"""`pip install .` gives a program that works away from the checkout, with its data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_installed_copy_runs_in_another_folder(tmp_path: Path) -> None:
    site = tmp_path / "site"
    # --no-deps: the environment of the tests has them, and torch alone is gigabytes.
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(ROOT)]
    subprocess.run(install, check=True, timeout=300)
    assert (site / "fedspec_dist" / "data" / "images" / "digits.npz").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = "runpy.run_module('fedspec_dist.main', run_name='__main__')"
    script = f"import fedspec_dist, runpy; print(fedspec_dist.__file__); {run}"
    result = subprocess.run(
        [sys.executable, "-c", script, "rounds=1"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.splitlines()[0].startswith(str(site))
    assert list(elsewhere.glob("runs/digits-specgrad-*/model.safetensors"))
