"""What a person sees of a run: a live line in a terminal, one plain line a round elsewhere, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class ConsoleTracker:
    """Rounds done, the metric that counts, losses and time left."""

    def __init__(
        self, console: Console, name: str, num_rounds: int, resumed_round: int, headline: str = "test_accuracy"
    ) -> None:
        self._console = console
        self._name = name
        self._headline = headline
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
        numbers = f"{_numbers(record, self._headline)}  left {_duration(self._seconds_left(record['round']))}"
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
    table = Table(title=str(summary.get("name", "")), show_header=False, title_justify="left")
    for key, value in summary.items():
        if key != "name" and not isinstance(value, (dict, list)):  # what it was made with: for programs
            table.add_row(key, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    print(f"run folder: {folder}", file=console.file, flush=True)


def _numbers(record: Mapping[str, Any], headline: str) -> str:
    name = headline.removeprefix("test_").replace("_", " ")
    of_clients = f"client_{headline.removeprefix('test_')}_mean"
    shown = {headline: name, of_clients: "of clients", "test_loss": "test loss", "train_loss": "train loss"}
    present = [(label, record[key]) for key, label in shown.items() if record.get(key) is not None]
    return "  ".join(f"{label} {value:.4f}" for label, value in present)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
