"""`metrics.jsonl`: one flat JSON object a round, in order, each round once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


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
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file, up to the first broken line; none without a file."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(record, dict) or "round" not in record:
            break
        records.append(record)
    return records


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
