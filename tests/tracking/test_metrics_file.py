"""`metrics.jsonl`: each round once, strict JSON, whatever was killed or damaged before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedspec_dist.runs.folder import OutputError
from fedspec_dist.runs.trackers.metrics import MetricsFile, Trackers, num_missing, read


def _write(path: Path, rounds: range, resumed: int = 0) -> None:
    metrics = MetricsFile(path, resumed)
    for number in rounds:
        metrics.log({"round": number, "test_loss": number / 10})
    metrics.close()


def _rounds(path: Path) -> list[int]:
    return [json.loads(line)["round"] for line in path.read_text().splitlines()]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def test_rounds_after_the_checkpoint_and_half_a_line_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"round": 8, "test_l')
    _write(path, range(6, 9), resumed=5)
    assert _rounds(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    metrics.log({"round": 1})
    assert _rounds(tmp_path / "metrics.jsonl") == [1]
    metrics.close()


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.log({"round": 1, "test_loss": float("nan"), "a/b": float("-inf"), "cohort": [1, 2], "lr": 0.1})
    metrics.close()
    (line,) = path.read_text().splitlines()
    record = json.loads(line, parse_constant=_refuse)
    assert record == {"round": 1, "test_loss": None, "a/b": None, "cohort": [1, 2], "lr": 0.1}


def test_nan_of_an_older_version_is_mended_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1, "test_loss": NaN}\n')
    MetricsFile(path, 1).close()
    assert path.read_text() == '{"round": 1, "test_loss": null}\n'


@pytest.mark.parametrize(
    "rubbish", [b"\xff\xfe\x00\n", b"not json\n", b"[1, 2]\n", b'{"loss": 1}\n', b'{"round": "x"}\n', b"\n"]
)
def test_broken_lines_cost_only_themselves(rubbish: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"round": 1}\n' + rubbish + b'{"round": 2}\n{"round": 2}\n')
    assert [record["round"] for record in read(path)] == [1, 2]


def test_lost_rounds_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read(path) == []
    assert num_missing(path, 0, 4) == 4
    path.write_text('{"round": 1}\n{"round": 3}\n{"round": 9}\n')
    assert num_missing(path, 0, 4) == 2
    assert num_missing(path, 0, 1) == 0
    assert num_missing(path, 2, 4) == 1, "of a branch, which has no rounds before"


def test_a_full_disk_is_one_sentence_with_advice(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    metrics._file.close()
    metrics._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(OutputError, match=r"metrics\.jsonl could not be written: No space left.*free space .*resume"):
        metrics.log({"round": 1})
    metrics.close()


class _Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log(self, record: Any) -> None:
        self.seen.append(record)

    def close(self) -> None:
        self.seen.append("closed")


def test_several_trackers_are_one() -> None:
    recorders = [_Recorder(), _Recorder()]
    trackers = Trackers(recorders)
    trackers.log({"round": 1})
    trackers.close()
    assert [recorder.seen for recorder in recorders] == [[{"round": 1}, "closed"]] * 2
