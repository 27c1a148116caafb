"""`events.jsonl`: what became of a run, one JSON object a line, written by the run itself.

    started    rank 0 has the run folder; `headline`: the metric that counts, and whether `max` or `min` is better
    branched   from another run, whose `round` rounds its own are counted on from
    resumed    from the checkpoint of `round`
    stopped    `by` a signal, after `round`
    failed     `kind` (see failures.py), `rank`, `host`, `message`
    diverged   `origin`, `round`, `message`: numbers that are not finite; the same run would do the same again
    finished

Each has its `time` in seconds since 1970, the `job_id` where a scheduler gives one, and the `attempt`: a name that all
ranks of one start of the job share. A run that died without a word (a kill, a lost node) has none at its end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspec_dist.core.failures import Kind, Origin, kind_of
from fedspec_dist.runs.safe_files import append_line, read_objects

STARTED, BRANCHED, RESUMED, STOPPED, FAILED, DIVERGED, FINISHED = (
    "started",
    "branched",
    "resumed",
    "stopped",
    "failed",
    "diverged",
    "finished",
)
_ENDS = (STOPPED, FAILED, DIVERGED, FINISHED)
_MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True)
class Event:
    """A line of the file. `facts` are those of its name, unchecked."""

    name: str
    time: float
    attempt: str
    job_id: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> str:
        return str(self.facts.get("message", ""))


class Events:
    """Writes events of one rank; a line that cannot be written is left out, since the run is what matters."""

    def __init__(self, path: Path, attempt: str, rank: int, host: str, job_id: str | None = None) -> None:
        self._path = path
        self._attempt = attempt
        self._rank = rank
        self._host = host
        self._job_id = job_id
        self._may_make_folder = rank == 0  # once, for what ends a run before it begins; one that is gone stays gone

    def write(self, name: str, **facts: Any) -> None:
        line = {"event": name, "time": time.time(), "attempt": self._attempt, "job_id": self._job_id, **facts}
        with contextlib.suppress(OSError):
            if self._may_make_folder:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._may_make_folder = False
            append_line(self._path, json.dumps(line))

    def failure(self, error: BaseException) -> None:
        """What ended this rank. Nothing where the folder is another process's: what happens there is its to tell."""
        kind = kind_of(error)
        facts = {"rank": self._rank, "host": self._host, "message": _message(error)}
        if isinstance(error, KeyboardInterrupt):
            self.write(STOPPED, by="SIGINT", **facts)
        elif kind is Kind.DIVERGED:
            origin = getattr(error, "origin", Origin.RESULT).value
            self.write(DIVERGED, origin=origin, round=getattr(error, "round_number", None), **facts)
        elif kind is not Kind.IN_USE:
            self.write(FAILED, kind=kind.value, **facts)


def _message(error: BaseException) -> str:
    ours = isinstance(error, (ValueError, OSError)) or hasattr(error, "kind")  # with a message made for the user
    text = str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."


def read(path: Path) -> list[Event]:
    """In the order in which they were written; what is no event is left out."""
    found = []
    for line in read_objects(path):
        name, at, attempt, job_id = (line.get(key) for key in ("event", "time", "attempt", "job_id"))
        if isinstance(name, str) and isinstance(at, (int, float)) and isinstance(attempt, str):
            facts = {key: value for key, value in line.items() if key not in ("event", "time", "attempt", "job_id")}
            found.append(Event(name, float(at), attempt, job_id if isinstance(job_id, str) else None, facts))
    return found


def last_end(events: Sequence[Event], since: float = 0.0) -> Event | None:
    """How the last start of the job ended; None when it goes on, or died without a word.

    Of several ranks that failed, the first: it was the cause. `since`, in seconds since 1970: nothing before it counts.
    """
    if not events or events[-1].time < since:
        return None
    latest = [event for event in events if event.attempt == events[-1].attempt]
    starts = [number for number, event in enumerate(latest) if event.name == STARTED]
    ends = [event for event in latest[starts[-1] if starts else 0 :] if event.name in _ENDS]
    causes = [event for event in ends if event.name in (FAILED, DIVERGED)]
    return causes[0] if causes else ends[-1] if ends else None


def headline(events: Sequence[Event]) -> tuple[str, str]:
    """The metric that counts in a run, and its direction; earlier versions, which did not say, had one task."""
    said = [event.facts["headline"] for event in events if "headline" in event.facts]
    sound = [pair for pair in said if isinstance(pair, list) and len(pair) == 2 and pair[1] in ("max", "min")]
    return (str(sound[-1][0]), sound[-1][1]) if sound else ("test_accuracy", "max")


def rounds_before(events: Sequence[Event]) -> int:
    """How many rounds came before those of the run, in the runs that it branched from."""
    said = [event.facts.get("round") for event in events if event.name == BRANCHED]
    return said[-1] if said and type(said[-1]) is int else 0


def diverged_at_a_client(event: Event) -> bool:
    """Whether `runtime.on_nonfinite=skip` would go on where this run ended."""
    return event.name == DIVERGED and event.facts.get("origin") == Origin.CLIENT.value
