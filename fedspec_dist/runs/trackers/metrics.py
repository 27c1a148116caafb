"""`metrics.jsonl`: one flat JSON object a round, in order, each round once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from fedspec_dist.runs.folder import cannot_write, finite_or_null, write_text
from fedspec_dist.runs.safe_files import open_own, read_objects

# How the names of what readers take for numbers begin.
_NUMBERS = ("test_", "val_", "client_", "train_loss", "bytes_exchanged", "seconds_")


class Tracker(Protocol):
    def log(self, record: Mapping[str, Any]) -> None:
        """One finished round."""

    def close(self) -> None: ...


class ClientTracker:
    """Is told of the metrics of each client; keeps nothing, as on ranks other than 0."""

    def log(self, round_number: int, clients: Mapping[int, Mapping[str, float]]) -> None:
        """Of a round in which clients were evaluated."""

    def close(self) -> None: ...


class NullTracker:
    """Tracks nothing; what ranks other than 0 hold."""

    def log(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsFile:
    """Appends records to a file that first loses all rounds after `resumed_round`.

    A killed run may have written rounds that its newest checkpoint does not hold, and half a line; both go, so that
    the resumed run writes every round exactly once.
    """

    def __init__(self, path: Path, resumed_round: int) -> None:
        self._path = path
        kept = [record for record in read(path) if record["round"] <= resumed_round]
        write_text(path, "".join(_line(record) for record in kept))
        try:
            self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error

    @property
    def file(self) -> IO[str]:
        return self._file

    def log(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that `log` has already complained about
            self._file.close()


class ClientsFile(ClientTracker):
    """`clients.jsonl`: a line for each client and each time that it is evaluated. It, too, loses later rounds first."""

    def __init__(self, path: Path, resumed_round: int) -> None:
        self._path = path
        if path.exists():
            kept = [r for r in read_objects(path) if type(r.get("round")) is int and r["round"] <= resumed_round]
            write_text(path, "".join(_line(record) for record in kept))

    def log(self, round_number: int, clients: Mapping[int, Mapping[str, float]]) -> None:
        lines = [_line({"round": round_number, "client": client, **row}) for client, row in clients.items()]
        try:
            with os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            raise cannot_write(self._path, error) from error


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_null(record), allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file in order of their rounds, each once; broken lines are left out."""
    records = {record["round"]: record for record in read_objects(path) if _is_record(record)}
    return [records[number] for number in sorted(records)]


def num_missing(path: Path, first: int, completed: int) -> int:
    """How many of the rounds after `first`, up to `completed`, have no record."""
    return completed - first - sum(first < record["round"] <= completed for record in read(path))


def _is_record(content: Mapping[str, Any]) -> bool:
    """Whether readers find what they expect: a line may be JSON and yet be nobody's record."""
    numbers = [value for key, value in content.items() if key.startswith(_NUMBERS)]
    return type(content.get("round")) is int and content["round"] > 0 and all(map(_is_number_or_null, numbers))


def _is_number_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, record: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(record)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
