"""What a sweep wants next, and its tables, from run folders that are written by hand."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from fedspec_dist.config import ConfigError
from fedspec_dist.core.failures import NonFiniteError
from fedspec_dist.distributed.collectives import CollectiveError
from fedspec_dist.fisher.sketch import NonFiniteFisherError
from fedspec_dist.rounds.divergence import NonFiniteModelError, NonFiniteUpdateError
from fedspec_dist.runs import events
from launch.axes import Run, load_sweep
from launch.collect import as_csv, rows, state_tables, summary
from launch.outcomes import Outcome, Outcomes, read_outcome
from launch.study import Study

BAD_CLIENT = NonFiniteUpdateError("client 3 returned a non-finite update in round 2 (rank 0)", 2)


def study_of(folder: Path, text: str, *more: str) -> Study:
    path = folder / "study.yaml"
    path.write_text(text)
    return Study(load_sweep(path, [f"output={folder / 'runs'}", *more]), Outcomes())


def finish(run: Run, *accuracies: float) -> None:
    write_metrics(run.folder, *accuracies)
    (run.folder / "summary.json").write_text(json.dumps({"status": "finished", "ranks": 2}))


def write_metrics(folder: Path, *accuracies: float) -> None:
    (folder / "log").mkdir(parents=True, exist_ok=True)
    records = [
        {
            "round": number,
            **{f"{split}_accuracy": value for split in ("test", "val")},
            **{f"{split}_loss": 1 - value for split in ("test", "val")},
            "seconds_round": 0.5,
        }
        for number, value in enumerate(accuracies, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def tell(folder: Path, *errors: Exception | str, rank: int = 0) -> None:
    """A start of the run, as its events tell of it: how it ended, by errors of ranks or by the name of an event."""
    writer = events.Events(folder / "events.jsonl", uuid.uuid4().hex, rank, "host")
    writer.write(events.STARTED)
    for error in errors:
        writer.write(error) if isinstance(error, str) else writer.failure(error)


def shown(runs: list[Run]) -> list[str]:
    return [str(run) for run in runs]


def run_all(study: Study, accuracy: Callable[[Run], float | None]) -> list[list[str]]:
    """Finish what is wanted until nothing is; None lets a run diverge. The batches."""
    batches = []
    while waiting := study.waiting():
        assert len(batches) < 20
        batches.append(shown(waiting))
        for run in waiting:
            if (value := accuracy(run)) is None:
                tell(run.folder, BAD_CLIENT)
            else:
                finish(run, value)
    return batches


# ------------------------------------------------------------------------------------------ outcomes


def test_states_of_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert read_outcome(folder).state == "pending"
    write_metrics(folder, 0.1, 0.2)
    assert read_outcome(folder).state == "unfinished"
    assert read_outcome(folder).round == 2
    tell(folder, OSError(28, "No space left"))
    assert read_outcome(folder).state == "failed"
    assert "No space left" in read_outcome(folder).error
    tell(folder, BAD_CLIENT)
    assert read_outcome(folder).state == "diverged"
    assert read_outcome(folder).complete
    assert read_outcome(folder, skips=True).state == "failed", "with skip it goes on"
    (folder / "summary.json").write_text('{"status": "diverged", "reason": "the final model is not finite"}')
    assert read_outcome(folder).state == "diverged"
    assert read_outcome(folder).score("test_accuracy", 1) is None
    assert read_outcome(folder, skips=True).error == "the final model is not finite"
    (folder / "summary.json").write_text('{"status": "finished"}')
    assert read_outcome(folder).state == "finished"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (NonFiniteModelError("the server's step of round 5 is not finite", 5), "diverged"),
        (NonFiniteError("fedgh: the Gram matrix of the updates has entries that are not finite"), "diverged"),
        (NonFiniteFisherError("fisher: not finite"), "diverged"),
        (ValueError("data.path: d.npz: train image at index 3 has a value that is not finite (nan or inf)"), "failed"),
        (RuntimeError("a NaN or infinite thing, non-finite"), "failed"),
        (MemoryError(), "failed"),
    ],
)
def test_what_has_diverged_is_told_by_the_kind_of_the_error_and_not_by_its_words(
    tmp_path: Path, error: Exception, state: str
) -> None:
    tell(tmp_path, error)
    assert read_outcome(tmp_path).state == state
    assert read_outcome(tmp_path, skips=True).state == state, "skip would not help"


def test_a_new_start_forgets_the_error_before(tmp_path: Path) -> None:
    tell(tmp_path, OSError("No space left"))
    tell(tmp_path)
    assert read_outcome(tmp_path).state == "unfinished"
    tell(tmp_path, "stopped")
    assert read_outcome(tmp_path).state == "unfinished"


def test_of_several_ranks_the_first_to_fail_is_the_cause(tmp_path: Path) -> None:
    for rank, error in ((1, BAD_CLIENT), (0, CollectiveError("rank 1 is gone"))):
        events.Events(tmp_path / "events.jsonl", "one start", rank, "host").failure(error)
    assert read_outcome(tmp_path).state == "diverged"


def test_a_run_folder_of_an_older_version_is_unfinished(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "rank-0.log").write_text("2026-01-31 12:00:02,123 ERROR x: is not finite\n")
    assert read_outcome(tmp_path).state == "unfinished"


def test_a_run_at_work_is_seen_by_its_lock_which_stays_untouched(tmp_path: Path) -> None:
    import os

    write_metrics(tmp_path, 0.1)
    with (tmp_path / ".lock").open("a+") as lock:
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        assert read_outcome(tmp_path).state == "unfinished", "nobody holds it"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_outcome(tmp_path).state == "running"
        assert read_outcome(tmp_path).state == "running", "asking took no lock"
        (tmp_path / ".lock").write_text("process 1 on another-host\n")
        assert read_outcome(tmp_path).state == "unfinished", "a file of that number, but not of this host's process"
    assert read_outcome(tmp_path).state == "unfinished"


def test_scores() -> None:
    records = [{"round": n, "test_accuracy": value, "test_loss": None} for n, value in enumerate([0.1, 0.8, 0.6], 1)]
    outcome = Outcome("finished", [*records, {"round": 4}])
    assert outcome.score("test_accuracy", 1) == 0.6
    assert outcome.score("test_accuracy", 2) == pytest.approx(0.7)
    assert outcome.score("test_loss", 1) is None
    assert outcome.best() == (0.8, 2)
    assert Outcome("finished", records, headline=("test_accuracy", "min")).best() == (0.1, 1)
    assert Outcome("diverged", records).score("test_accuracy", 1) is None


# ------------------------------------------------------------------------------------------ what comes next

TUNED = """
seeds: [1, 2]
methods:
  plain:
  prox: {overrides: [local.algorithm=fedprox], tune: {over: {local.algorithm.mu: [0.1, 0.2]}}}
tune: {over: {local.lr: [0.1, 0.2]}, seed: 0, expand: true, budget: 12}
"""


def test_without_tuning_all_runs_are_wanted_at_once(tmp_path: Path) -> None:
    study = study_of(tmp_path, "seeds: [1, 2]\naxes: {grid: {local.lr: [0.1, 0.2]}}")
    assert len(study.waiting()) == 4
    finish(study.waiting()[0], 0.5)
    assert shown(study.waiting())[0] == "digits-specgrad local.lr=0.1 seed=2"
    assert len(study.waiting()) == 3


def test_a_tuning_grows_and_then_the_seeds_run_at_its_best(tmp_path: Path) -> None:
    study = study_of(tmp_path, TUNED)
    batches = run_all(study, lambda run: 1 - abs(run.config.local.lr - 0.4) - abs(run.tuned.get("mu", 0)))
    assert batches[0][:2] == ["plain local.lr=0.1 seed=0", "plain local.lr=0.2 seed=0"]
    assert "plain local.lr=0.4 seed=0" in batches[1]
    assert batches[2].count("plain local.lr=0.8 seed=0") == 1
    assert batches[3][:2] == ["plain local.lr=0.4 seed=1", "plain local.lr=0.4 seed=2"]
    plain, prox = study.progress()
    assert plain.verdict is not None
    assert plain.verdict.interior
    assert plain.tuned == {"local.lr": 0.4}
    assert prox.verdict is not None
    assert not prox.verdict.interior, "mu makes no difference: an endless plateau"
    assert prox.verdict.tried == 12


def test_methods_do_not_wait_for_each_other(tmp_path: Path) -> None:
    study = study_of(tmp_path, TUNED)
    for run in study.waiting():
        if run.method == "plain":
            finish(run, 0.9 if run.config.local.lr == 0.1 else 0.1)
    waiting = [run for run in study.waiting() if run.method == "plain"]
    assert shown(waiting) == ["plain local.lr=0.05 seed=0"]


def test_a_loss_is_tuned_downward(tmp_path: Path) -> None:
    text = "tune: {over: {local.lr: [0.1, 0.2, 0.3]}, metric: test_loss}\nseeds: [5]"
    study = study_of(tmp_path, text)
    run_all(study, lambda run: 1 - abs(run.config.local.lr - 0.2))
    (progress,) = study.progress()
    assert progress.tuned == {"local.lr": 0.2}
    assert "| 0.0000 |" in summary(study)


def test_diverged_points_are_results(tmp_path: Path) -> None:
    study = study_of(tmp_path, "tune: {over: {local.lr: [0.1, 0.2]}, expand: true, budget: 9}\nseeds: [1]")
    run_all(study, lambda run: run.config.local.lr if run.config.local.lr <= 0.2 else None)
    (progress,) = study.progress()
    assert progress.tuned == {"local.lr": 0.2}
    assert progress.verdict is not None
    assert progress.verdict.interior


def test_a_method_that_always_diverges_has_no_final_runs(tmp_path: Path) -> None:
    study = study_of(tmp_path, "tune: {over: {local.lr: [0.1, 0.2]}, expand: true, budget: 9}\nseeds: [1]")
    batches = run_all(study, lambda run: None)
    assert len(batches) == 1
    assert "not verified: no point has a finite result" in summary(study)
    assert [str(case) for case in study.lost()] == [progress.case.method for progress in study.progress()]


@pytest.mark.parametrize(
    ("values", "tried"),
    [("[2, 5]", {2, 5}), ("[0.25, 0.5]", {0.125, 0.25, 0.5}), ("[1, 2]", {1, 2}), ("[0.5, 1.0]", {0.25, 0.5, 1.0})],
)
def test_a_count_of_clients_does_not_grow_into_a_share(tmp_path: Path, values: str, tried: set[float]) -> None:
    text = f"tune: {{over: {{clients_per_round: {values}}}, expand: true, budget: 3}}\nseeds: [1]"
    study = study_of(tmp_path, text)
    run_all(study, lambda run: -float(run.config.clients_per_round))
    (progress,) = study.progress()
    found = {run.config.clients_per_round for run in progress.tuning}
    assert tried <= found
    assert len({type(value) for value in found}) == 1


def test_growth_asks_the_config_for_bounds(tmp_path: Path) -> None:
    study = study_of(tmp_path, "tune: {over: {filter.ratio: [0.5, 0.9]}, expand: true, budget: 20}\nseeds: [1]")
    run_all(study, lambda run: run.config.filter.parameters()["ratio"])
    (progress,) = study.progress()
    assert progress.verdict is not None
    assert progress.verdict.reason.startswith("at the bound of what the config allows: filter.ratio above 0.9")


def test_equal_runs_of_two_methods_run_once(tmp_path: Path) -> None:
    study = study_of(tmp_path, "methods: {a: , b: {overrides: [local.momentum=0.0]}}")
    assert shown(study.waiting()) == ["a seed=0"]
    finish(study.waiting()[0], 0.7)
    assert study.waiting() == []
    assert summary(study).count("0.7000") == 2


# ------------------------------------------------------------------------------------------ tables


def finished_study(tmp_path: Path) -> Study:
    text = """
seeds: [1, 2, 3]
axes: {grid: {data.partition.alpha: [0.1]}}
methods:
  plain:
  "a|b": {overrides: [local.algorithm=fedprox], axes: {grid: {local.algorithm.mu: [0.5]}}}
  wild: {overrides: [local.lr=1e18]}
"""
    study = study_of(tmp_path, text)
    for run, value in zip(study.waiting(), [0.5, 0.6, 0.7, 0.8, 0.9], strict=False):
        finish(run, 0.95, value)
    wild = [run for run in study.waiting() if run.method == "wild"]
    tell(wild[0].folder, NonFiniteUpdateError(f'{BAD_CLIENT}\na "quoted", line', 2))
    return study


def test_summary_has_mean_and_spread_with_incomplete_methods_last(tmp_path: Path) -> None:
    assert summary(finished_study(tmp_path)) == (
        "| method | last test_accuracy | spread | seeds |\n"
        "| --- | --- | --- | --- |\n"
        "| plain data.partition.alpha=0.1 | 0.6000 | 0.1000 | 3/3 |\n"
        "| a\\|b data.partition.alpha=0.1 local.algorithm.mu=0.5 | 0.8500 | 0.0707 | 2/3 |\n"
        "| wild data.partition.alpha=0.1 |  |  | 0/3, 1 diverged |\n"
        "\nMeans leave diverged runs out; the column of seeds counts them.\n"
    )


def test_csv_has_a_row_a_run(tmp_path: Path) -> None:
    table = list(csv.DictReader(io.StringIO(as_csv(rows(finished_study(tmp_path))))))
    assert len(table) == 9
    assert [row["state"] for row in table] == ["finished"] * 5 + ["pending", "diverged", "pending", "pending"]
    first = {key: table[0][key] for key in list(table[0]) if key != "folder"}
    assert first == {
        "method": "plain",
        "stage": "result",
        "data.partition.alpha": "0.1",
        "local.algorithm.mu": "",
        "seed": "1",
        "state": "finished",
        "round": "2",
        "rounds": "20",
        "score": "0.5",
        "final_test_accuracy": "0.5",
        "best_test_accuracy": "0.95",
        "best_round": "1",
        "final_test_loss": "0.5",
        "seconds": "1.0",
        "ranks": "2",
        "error": "",
    }
    assert table[3]["local.algorithm.mu"] == "0.5"
    assert table[6]["error"].startswith("client 3 returned")
    assert table[6]["error"].endswith('a "quoted", line')


def test_the_table_says_what_the_configs_had(tmp_path: Path) -> None:
    """Also of runs that another part of the file gave the value, or that have it by default."""
    text = """
methods:
  swept: {axes: {grid: {local.lr: [1], filter: [{type: lapd, ratio: 0.2}], clients_per_round: [1.0]}}}
  set: {overrides: [local.lr=0.3, filter=none]}
  phased: {overrides: ['phases=[{rounds: 2}, {rounds: 3}]'], axes: {grid: {phases.1.local.lr: [0.7]}}}
"""
    table = rows(study_of(tmp_path, text))
    assert [row["local.lr"] for row in table] == [1.0, 0.3, 0.05]
    assert [row["filter"] for row in table] == [{"type": "lapd", "ratio": 0.2}, "none", "rfft"]
    assert [row["clients_per_round"] for row in table] == [1.0, 5, 5]
    assert [row["phases.1.local.lr"] for row in table] == [None, None, 0.7]
    assert [row["rounds"] for row in table] == [20, 20, 5]


def test_summary_of_a_tuning(tmp_path: Path) -> None:
    study = study_of(tmp_path, "tune: {over: {local.lr: [0.1, 0.2, 0.3]}, last: 2}\nseeds: [0, 1]")
    assert "| still tuning |" in summary(study)
    for run in study.waiting():
        finish(run, 0.1, 0.8 - abs(run.config.local.lr - 0.2), 0.6 - abs(run.config.local.lr - 0.2))
    assert summary(study).splitlines()[0] == (
        "| method | tuned | test_accuracy, mean of the last 2 | spread | seeds | tuning | points | optimum |"
    )
    assert (
        "| digits-specgrad | `local.lr=0.2` |  |  | 0/2 | 0.7000 | 3 | interior: values on all sides are worse |"
    ) in summary(study), "the tuning's run of seed 0, which kept samples for validation, is no result"
    finish(study.waiting()[0], 0.9, 0.5)
    assert "| 0.7000 |  | 1/2 | 0.7000 |" in summary(study)
    assert "Seed 0 is both the tuning's and among the seeds" in summary(study)
    stages = [row["stage"] for row in rows(study)]
    assert stages == ["tuning"] * 3 + ["result"] * 2


LEAST = """
overrides: ['data={dataset: csv, path: t.csv, target: y}', task=regression, model=mlp, 'data.partition=iid']
tune: {over: {local.lr: [0.1, 0.2, 0.3]}}
seeds: [1]
methods: {a: , b: {overrides: [local.epochs=7]}}
"""


def test_less_is_better_where_the_task_says_so(tmp_path: Path) -> None:
    study = study_of(tmp_path, LEAST)
    for run in study.waiting():
        assert run.config.data.holdout == 0.1
        # The test set would have it the other way round.
        finish_with(run, val_mse=abs(run.config.local.lr - 0.2), test_mse=run.config.local.epochs)
    runs = study.waiting()
    assert [(run.method, run.config.local.lr, run.config.data.holdout) for run in runs] == [
        ("a", 0.2, 0),
        ("b", 0.2, 0),
    ]
    for run in runs:
        finish_with(run, test_mse=10 - run.config.local.epochs)
    lines = summary(study).splitlines()
    assert lines[0].startswith("| method | tuned | last test_mse |")
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["b", "a"]
    assert "| 0.0000 | 3 | interior: values on all sides are worse |" in lines[2]
    assert [row["final_test_mse"] for row in rows(study)[-2:]] == [10 - run.config.local.epochs for run in runs]


@pytest.mark.parametrize(
    ("given", "metric", "sign"),
    [
        ("", "val_mse", -1),
        ("metric: test_r2, ", "val_r2", 1),
        ("metric: train_loss, ", "train_loss", -1),
        ("metric: client_mse_worst_decile, ", "client_mse_worst_decile", -1),
    ],
)
def test_what_a_tuning_compares_is_never_the_test_set(
    given: str, metric: str, sign: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = study_of(tmp_path, LEAST.replace("{over:", f"{{{given}over:"), "eval.on=[clients]")
    run = study.waiting()[0]
    assert (study.metric_of(run), study.sign(study.sweep.cases[0], tuning=True)) == ((metric, 1), sign)
    assert run.config.data.holdout == (0.1 if metric.startswith("val_") else 0)
    warned = "tune.metric: test_r2 is what results are tested by; settings are compared by val_r2" in caplog.text
    assert warned == ("test_" in given)


def test_clients_own_test_samples_are_not_tuned_on(tmp_path: Path) -> None:
    text = LEAST.replace("=iid", "={type: natural, clients: null}").replace("{over:", "{metric: client_mse_mean, over:")
    with pytest.raises(ConfigError, match=r"tune\.metric: got client_mse_mean, which with data\.partition natural"):
        study_of(tmp_path, text)


def finish_with(run: Run, phases: Sequence[dict[str, float]] = (), **values: float) -> None:
    (run.folder / "log").mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text(json.dumps({"round": 1, **values}))
    (run.folder / "summary.json").write_text(json.dumps({"status": "finished", "phases": phases}))
    writer = events.Events(run.folder / "events.jsonl", uuid.uuid4().hex, 0, "host")
    writer.write(events.STARTED, headline=list(run.config.headline()))


def test_results_of_phases_have_columns(tmp_path: Path) -> None:
    text = "methods: {one: , two: {overrides: ['phases=[{rounds: 2}, {rounds: 3}]']}, new: {overrides: [seed=9]}}"
    study = study_of(tmp_path, text)
    one, two, _ = study.waiting()
    finish_with(one, [{"phase": 0, "best": 0.7, "mean": 0.6, "last": 0.5}])
    finish_with(two, [{"phase": n, "best": n + 0.3, "mean": n + 0.2, "last": n + 0.1} for n in range(2)])
    keys = ["phases.0.best", "phases.0.mean", "phases.0.last", "phases.1.best", "phases.1.mean", "phases.1.last"]
    table = [[row[key] for key in keys] for row in rows(study)]
    assert table == [[0.7, 0.6, 0.5, *[None] * 3], [0.3, 0.2, 0.1, 1.3, 1.2, 1.1], [None] * 6]


def test_status_names_states_and_errors(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    pending = next(run for run in study.waiting() if run.method == "wild")
    console = Console(width=250, record=True, file=io.StringIO())
    for table in state_tables(study, {pending.folder: "queued"}):
        console.print(table)
    text = console.export_text()
    assert "3 finished" in text
    assert "1 diverged" in text
    assert "1 queued" in text
    assert 'a "quoted", line' in text


def test_status_shows_brackets_as_they_are(tmp_path: Path) -> None:
    study = study_of(tmp_path, 'methods: {"[/x]": {axes: {list: [{"phases": [{rounds: 2}]}]}}}')
    (run,) = study.waiting()
    tell(run.folder, OSError("no [/bold] left"))
    console = Console(width=250, record=True, file=io.StringIO())
    for table in state_tables(study, {}):
        console.print(table)
    text = console.export_text()
    assert '[/x] phases=[{"rounds": 2}] seed=0' in text
    assert "no [/bold] left" in text
