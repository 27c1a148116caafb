"""Which runs a sweep wants now, worked out from the results that there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedspec_dist.config import ConfigError
from fedspec_dist.config.methods import headline_of
from launch.axes import Case, Run, Sweep
from launch.changes import Changes
from launch.outcomes import Outcomes
from launch.start import SubmitError
from launch.tune import Point, Search, Verdict, step


@dataclass(frozen=True)
class Progress:
    """The runs of a case that are known by now."""

    case: Case
    tuning: list[Run]
    verdict: Verdict | None  # None: not tuned, or not yet
    final: list[Run]

    @property
    def tuned(self) -> dict[str, object] | None:
        """The best values, once they are known."""
        if self.verdict is None or self.verdict.best is None:
            return None
        return dict(zip(self.case.over, self.verdict.best, strict=True))


class Study:
    """A sweep with its results; everything is asked anew, so it is right after any interruption."""

    def __init__(self, sweep: Sweep, outcome: Outcomes, changes: Changes | None = None) -> None:
        self.sweep = sweep
        self.outcome = outcome
        self._start_over = outcome.start_over
        self._changes = changes  # to be looked for before a run is taken for done, or resumed

    def start_over(self, run: Run) -> None:
        """Before a run is started: with `--fresh`, what its folder has of earlier ones goes.

        Raises:
            SubmitError: another process is at work in it, or it cannot be written.
        """
        try:
            self._start_over(run)
        except ValueError as error:
            raise SubmitError(str(error)) from error

    def progress(self) -> list[Progress]:
        return [self._progress(case) for case in self.sweep.cases]

    def waiting(self) -> list[Run]:
        """Runs that can be run now and have no result."""
        known = self.known()
        if self._changes is not None:
            self._changes.check(run.config for run in known)
        return [run for run in known if not self.outcome(run).complete]

    def known(self) -> list[Run]:
        """All that can be run by now, each folder once."""
        return unique(run for progress in self.progress() for run in [*progress.tuning, *progress.final])

    def lost(self) -> list[Case]:
        """Cases whose tuning found no point with a result: there is nothing to run their seeds with."""
        return [progress.case for progress in self.progress() if progress.verdict and progress.verdict.best is None]

    def headline(self) -> tuple[str, str]:
        """The metric that counts in these runs, and its direction."""
        return self.sweep.cases[0].config().headline()

    def metric_of(self, run: Run) -> tuple[str, int]:
        """What it is compared by: a metric, and how many last values its mean is of."""
        tune = self.sweep.tune
        if run.tuning and tune is not None:
            return tune.metric_for(run.config), tune.last
        return run.config.headline()[0], self.last

    @property
    def last(self) -> int:
        return self.sweep.tune.last if self.sweep.tune is not None else 1

    def sign(self, case: Case, tuning: bool) -> int:
        """1 where more of what its results are compared by, or its tuning, is better; -1 where less is."""
        config, tune = case.config(), self.sweep.tune
        if not tuning or tune is None:
            return 1 if config.headline()[1] == "max" else -1
        return sign_of(tune.metric_for(config), headline_of(config.task.type))

    def score(self, run: Run) -> float | None:
        return self.outcome(run).score(*self.metric_of(run))

    def _progress(self, case: Case) -> Progress:
        if self.sweep.tune is None:
            return Progress(case, [], None, [case.run({}, seed) for seed in self.sweep.seeds])
        tuning, verdict = self._tune(case)
        progress = Progress(case, tuning, verdict, [])
        if progress.tuned is None:
            return progress
        return Progress(case, tuning, verdict, [case.run(progress.tuned, seed) for seed in self.sweep.seeds])

    def _tune(self, case: Case) -> tuple[list[Run], Verdict | None]:
        tune = self.sweep.tune
        assert tune is not None

        def run_at(point: Point) -> Run:
            return case.run(dict(zip(case.over, point, strict=True)), tune.seed, tune)

        def legal(point: Point) -> bool:
            if any(_changes_meaning(key, value, case.over[key]) for key, value in zip(case.over, point, strict=True)):
                return False
            try:
                run_at(point)
            except ConfigError:
                return False
            return True

        search = Search(case.over, tune.expand, tune.budget, tune.tolerance)
        told: dict[Point, float | None] = {}
        runs: list[Run] = []
        while not isinstance(asked := step(search, told, legal), Verdict):
            new = {point: run_at(point) for point in asked}
            runs += new.values()
            if not all(self.outcome(run).complete for run in new.values()):
                return runs, None
            scores = {point: self.score(run) for point, run in new.items()}
            sign = self.sign(case, tuning=True)
            told |= {point: None if score is None else sign * score for point, score in scores.items()}
        return runs, asked


def _changes_meaning(key: str, value: object, first: Sequence[object]) -> bool:
    """`clients_per_round` is a count as a whole number, else a share: an axis of the one grows into no other."""
    if key.rpartition(".")[2] != "clients_per_round" or not isinstance(value, (int, float)):
        return False
    return any(isinstance(other, (int, float)) and type(value) is not type(other) for other in first)


def sign_of(metric: str, headline: tuple[str, str]) -> int:
    """1 where more of a metric is better. Of others than the task's headline: losses and errors are better small."""
    stem, (name, direction) = metric.partition("_")[2], headline
    if stem in (name, f"{name}_mean", f"{name}_worst_decile"):
        return 1 if direction == "max" else -1
    return 1 if stem in ("accuracy", "r2") else -1


def unique(runs: Iterable[Run]) -> list[Run]:
    """Each run folder once, by the first run that has it."""
    first: dict[Path, Run] = {}
    for run in runs:
        first.setdefault(run.folder, run)
    return list(first.values())
