"""What a person sees of a run: a live line in a terminal, one plain line a round elsewhere, a table at the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Output:
    """A stream as long as somebody reads it: a closed pipe or terminal costs the display, not the run.

    What its encoding cannot express is escaped.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with self._given_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._given_up():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is in the buffer would fail again, at the latest when Python exits.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class ConsoleTracker:
    """Rounds done, accuracy, loss and time left."""

    def __init__(self, console: Console, name: str, num_rounds: int, resumed_round: int) -> None:
        self._console = console
        self._name = name
        self._num_rounds = num_rounds
        self._first = resumed_round
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._progress.add_task(name, total=num_rounds, completed=resumed_round, numbers="")
            self._progress.start()

    def log(self, record: Mapping[str, Any]) -> None:
        numbers = f"{_numbers(record)}  left {_duration(self._seconds_left(record['round']))}"
        if self._progress is not None:
            self._progress.update(self._task, completed=record["round"], numbers=numbers)
        else:
            # Plain print: rich would wrap the line at the width of a terminal that is not there.
            print(
                f"round {record['round']:>{len(str(self._num_rounds))}}/{self._num_rounds}  {numbers}",
                file=self._console.file,
                flush=True,
            )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _seconds_left(self, done: int) -> float:
        per_round = (time.monotonic() - self._started) / max(done - self._first, 1)
        return per_round * (self._num_rounds - done)


def print_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """The closing table: the numbers of `summary.json`, and where everything lies."""
    table = Table(title=str(summary["name"]), show_header=False, title_justify="left")
    for key, value in summary.items():
        if key != "name":
            table.add_row(key, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    print(f"run folder: {folder}", file=console.file, flush=True)


def _numbers(record: Mapping[str, Any]) -> str:
    shown = {"test_accuracy": "accuracy", "test_loss": "test loss", "train_loss": "train loss"}
    present = [(label, record[key]) for key, label in shown.items() if record.get(key) is not None]
    return "  ".join(f"{label} {value:.4f}" for label, value in present)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
