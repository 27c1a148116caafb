"""Two checkouts measured in turn, at tiny sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.versions import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_checkout_against_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), "--pairs", "1", "--", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "pair 1",
        "seconds a round",
        "processor seconds a round",
        "of the plain loop's time",
        "of its processor time",
        "MiB at the peak of a rank",
    ]
    ours, theirs, ratio = map(float, re.findall(r"[0-9.]+", lines[-1])[:3])
    assert ratio == pytest.approx(ours / theirs, abs=1e-2)
    assert 0.9 < ratio < 1.1


def test_a_checkout_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"failed in {tmp_path}"):
        main([str(tmp_path), "--pairs", "1"])
