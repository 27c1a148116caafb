"""The console: a live line in a terminal, plain lines elsewhere, and nothing at all costs no run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from fedspec_dist.runs.streams import Output
from fedspec_dist.runs.trackers.console import ConsoleTracker, print_summary

RECORD = {"round": 3, "test_accuracy": 0.5, "test_loss": 1.25, "train_loss": None}


def _track(terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    tracker = ConsoleTracker(console, "digits", 12, resumed_round=2)
    tracker.log(RECORD)
    tracker.close()
    return file.getvalue()


def test_a_plain_line_a_round() -> None:
    assert _track(terminal=False) == "round  3/12  accuracy 0.5000  test loss 1.2500  left 0:00\n"


def test_a_live_line_in_a_terminal_that_gives_the_cursor_back() -> None:
    text = _track(terminal=True)
    assert "3/12" in text
    assert "accuracy 0.5000" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_summary_shows_every_number_and_the_folder() -> None:
    file = io.StringIO()
    summary = {"name": "digits", "status": "finished", "final_test_accuracy": 0.91234, "best_round": None}
    print_summary(Console(file=file, width=100), summary, Path("/some where/rün"))
    text = file.getvalue()
    for part in ("digits", "finished", "0.9123", "None", "run folder: /some where/rün\n"):
        assert part in text


def test_a_reader_that_goes_away_costs_the_display_only() -> None:
    code = (
        "import sys; from fedspec_dist.runs.streams import Output; from rich.console import Console\n"
        "out = Output(sys.stdout); console = Console(file=out)\n"
        "sys.stdin.readline()\n"
        "for _ in range(3): print('x' * 100000, file=out, flush=True); console.print('y')\n"
        "print('survived', file=sys.stderr)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate("go\n", timeout=30)
    assert (process.returncode, errors) == (0, "survived\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_lacks_is_escaped(encoding: str) -> None:
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, encoding=encoding))
    print("模型", "\udcff", file=cast(IO[str], output), flush=True)
    assert raw.getvalue() == b"\\u6a21\\u578b \\udcff\n"


def test_a_full_disk_behind_standard_output_is_no_reason_to_end(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        output = Output(full)
        for _ in range(2):
            print("x", file=cast(IO[str], output), flush=True)
        assert os.path.samestat(os.fstat(full.fileno()), os.stat(os.devnull))
