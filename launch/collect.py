"""Tables of a sweep: one row a run as CSV; mean and spread over seeds as markdown; states on the console."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.axes import Run, as_override
from launch.outcomes import DIVERGED, FAILED, FINISHED, PENDING
from launch.record import write
from launch.study import Progress, Study, unique

# Of a run; `{}` is the metric that counts.
_RESULTS = (
    "state",
    "round",
    "rounds",
    "score",
    "final_{}",
    "best_{}",
    "best_round",
    "final_test_loss",
    "seconds",
    "ranks",
    "error",
    "folder",
)


def rows(study: Study) -> list[dict[str, Any]]:
    """One mapping a run, those of the tuning first; all have the same keys in the same order."""
    progress = study.progress()
    runs = [("tuning", run) for item in progress for run in item.tuning]
    runs += [("result", run) for item in progress for run in item.final]
    num_phases = max((len(run.config.phases) for _, run in runs), default=0)
    keys = list(dict.fromkeys(key for _, run in runs for key in (*run.point, *run.tuned)))
    return [
        {
            "method": run.method,
            "stage": stage,
            **{key: _value(run, key) for key in keys},
            "seed": run.seed,
        }
        | _result(study, run)
        | (_by_phase(study, run, num_phases) if num_phases > 1 else {})
        for stage, run in runs
    ]


def _by_phase(study: Study, run: Run, num_phases: int) -> dict[str, Any]:
    """Of runs in several phases, what each came to, as their summaries have it."""
    found = study.outcome(run).summary.get("phases")
    told = {part.get("phase"): part for part in found if isinstance(part, dict)} if isinstance(found, list) else {}
    values = ("best", "mean", "last")
    return {f"phases.{n}.{value}": told.get(n, {}).get(value) for n in range(num_phases) for value in values}


def _value(run: Run, key: str) -> Any:
    """What the run has at a key of some run's axes; of another method's parameters, nothing."""
    known = run.point | run.tuned
    value = known[key] if key in known else run.config.value(key)
    return value.get("type") if isinstance(value, dict) and key not in known else value


def _result(study: Study, run: Run) -> dict[str, Any]:
    outcome = study.outcome(run)
    metric, _ = study.headline()
    best, best_round = outcome.best() or (None, None)
    values = (
        outcome.state,
        outcome.round,
        outcome.rounds_before + run.config.rounds,
        study.score(run),
        outcome.last(metric),
        best,
        best_round,
        outcome.last("test_loss"),
        sum(record.get("seconds_round", 0.0) for record in outcome.records),
        outcome.summary.get("ranks"),
        " ".join(outcome.error.split()),
        str(run.folder),
    )
    return dict(zip((name.format(metric) for name in _RESULTS), values, strict=True))


def as_csv(table: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def summary(study: Study) -> str:
    """Markdown: each case, its mean and standard deviation over seeds; best first, those with lacking seeds last."""
    (metric, _), last = study.headline(), study.last
    what = f"{metric}, mean of the last {last}" if last > 1 else f"last {metric}"
    tuned = study.sweep.tune is not None
    head = ["method", *(["tuned"] if tuned else []), what, "spread", "seeds"]
    head += ["tuning", "points", "optimum"] if tuned else []
    lines = [_summary_row(study, progress) for progress in study.progress()]
    body = [row for _, row in sorted(lines, key=lambda line: line[0])]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])
    return f"{text}\n{''.join(_notes(study))}"


def _summary_row(study: Study, progress: Progress) -> tuple[tuple[bool, float], list[str]]:
    """The row, and what it is sorted by."""
    scores = [score for run in progress.final if (score := study.score(run)) is not None]
    diverged = sum(study.outcome(run).state == DIVERGED for run in progress.final)
    seeds = f"{len(scores)}/{len(study.sweep.seeds)}{f', {diverged} diverged' if diverged else ''}"
    cells = [_cell(_label(progress))]
    if study.sweep.tune is not None:
        cells.append(_code(progress.tuned))
    cells += [
        f"{mean(scores):.4f}" if scores else "",
        f"{stdev(scores):.4f}" if len(scores) > 1 else "",
        seeds,
    ]
    sign = study.sign(progress.case, tuning=False)
    if study.sweep.tune is not None:
        cells += _verdict_cells(progress, study.sign(progress.case, tuning=True))
    return (len(scores) < len(study.sweep.seeds), -sign * mean(scores) if scores else 0.0), cells


def _label(progress: Progress) -> str:
    """The case by the values that its runs have."""
    runs = [*progress.final, *progress.tuning]
    return str(replace(progress.case, point=runs[0].point)) if runs else str(progress.case)


def _verdict_cells(progress: Progress, sign: int) -> list[str]:
    verdict = progress.verdict
    if verdict is None:
        return ["", str(len(progress.tuning)), "still tuning"]
    value = "" if verdict.value is None else f"{sign * verdict.value:.4f}"
    return [value, str(verdict.tried), f"{'interior' if verdict.interior else 'not verified'}: {_cell(verdict.reason)}"]


def _notes(study: Study) -> Iterable[str]:
    tune = study.sweep.tune
    if tune is not None and tune.seed in study.sweep.seeds:
        yield (
            f"\nSeed {tune.seed} is both the tuning's and among the seeds: its results are better than those of a seed "
            "that was not tuned on.\n"
        )
    if any(study.outcome(run).state == DIVERGED for item in study.progress() for run in item.final):
        yield "\nMeans leave diverged runs out; the column of seeds counts them.\n"


def state_tables(study: Study, states: Mapping[Path, str]) -> list[Table]:
    """For the console: a line a case, and one for each run that is under way or came to nothing.

    `states` has what is known of runs besides their folders, by folder: that they run now, or wait in a queue.
    """

    def state(run: Run) -> str:
        known = study.outcome(run).state
        return known if study.outcome(run).complete else states.get(run.folder, known)

    cases = Table("case", "runs", "points", "optimum", title=study.sweep.name, title_justify="left")
    for item in study.progress():
        counts = Counter(state(run) for run in unique([*item.tuning, *item.final]))
        shown = ", ".join(f"{number} {name}" for name, number in counts.most_common())
        if study.sweep.tune is None:
            cases.add_row(Text(str(item.case)), shown, "", "")
            continue
        _, points, optimum = _verdict_cells(item, study.sign(item.case, tuning=True))
        cases.add_row(Text(str(item.case)), shown, points, Text(optimum))
    runs = Table("run", "state", "round", study.headline()[0].removeprefix("test_").replace("_", " "))
    runs.add_column("error or folder", overflow="fold")
    for run in study.known():
        if (name := state(run)) in (FINISHED, PENDING):
            continue
        outcome = study.outcome(run)
        value = outcome.last(outcome.headline[0])
        runs.add_row(
            Text(str(run)),
            name,
            f"{outcome.round}/{outcome.rounds_before + run.config.rounds}",
            "" if value is None else f"{value:.4f}",
            Text(outcome.error.splitlines()[-1] if name in (FAILED, DIVERGED) and outcome.error else str(run.folder)),
        )
    return [cases, runs] if runs.row_count else [cases]


def one_line(study: Study, run: Run) -> str:
    """What a run that ended came to."""
    outcome = study.outcome(run)
    metric, _ = study.metric_of(run)
    score = study.score(run)
    rounds = outcome.rounds_before + run.config.rounds
    shown = f"{metric} {score:.4f}" if score is not None else f"after {outcome.round} of {rounds} rounds"
    return f"{outcome.state}: {run}: {shown}"


def _code(point: dict[str, Any] | None) -> str:
    return f"`{_cell(' '.join(as_override(key, value) for key, value in point.items()))}`" if point else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_report(study: Study) -> None:
    """The table so far, beside the run folders."""
    output = study.sweep.first_runs()[0].folder.parent
    write(output / f"{study.sweep.name}.md", summary(study))
