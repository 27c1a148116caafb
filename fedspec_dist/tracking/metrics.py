"""`metrics.jsonl`: one flat JSON object a round, in order, each round once."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedspec_dist.tracking.run_folder import cannot_write, finite_or_null, write_text

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, record: Mapping[str, Any]) -> None:
        """One finished round."""

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
        kept = [record for record in read(path) if record["round"] <= resumed_round]
        if len(kept) < resumed_round:
            log.warning("%s has lost %d of the %d rounds before", path, resumed_round - len(kept), resumed_round)
        write_text(path, "".join(_line(record) for record in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that `log` has already complained about
            self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_null(record), allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file in order of their rounds, each once; broken lines are left out."""
    if not path.exists():
        return []
    records: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("round"), int):
            records[record["round"]] = record
    return [records[number] for number in sorted(records)]


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
