"""The sweep file: what it stands for, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspec_dist.config import ConfigError
from fedspec_dist.config.files import split
from launch.axes import Run, as_override, load_sweep

ROOT = Path(__file__).parents[2]


def sweep_of(folder: Path, text: str, *more: str) -> list[Run]:
    path = folder / "study.yaml"
    path.write_text(text)
    return load_sweep(path, more).first_runs()


def refused(folder: Path, text: str, *more: str) -> str:
    with pytest.raises(ConfigError) as error:
        sweep_of(folder, text, *more)
    return str(error.value).replace(f"{folder / 'study.yaml'}: ", "")


def shown(runs: list[Run]) -> list[str]:
    return [str(run) for run in runs]


def test_an_empty_file_is_one_run_of_the_default(tmp_path: Path) -> None:
    (run,) = sweep_of(tmp_path, "")
    assert str(run) == "digits-specgrad seed=0"
    assert run.arguments == []


def test_grid_zip_and_list_are_combined(tmp_path: Path) -> None:
    runs = sweep_of(
        tmp_path,
        """
seeds: [1, 2]
axes:
  grid: {local.lr: [0.1, 1]}
  zip: {local.epochs: [1, 5], rounds: [100, 20]}
  list: [{filter: none}, {filter: rfft, filter.ratio: 0.1}]
""",
    )
    assert len(runs) == 2 * 2 * 2 * 2
    assert shown(runs)[:3] == [
        "digits-specgrad local.lr=0.1 local.epochs=1 rounds=100 filter=none seed=1",
        "digits-specgrad local.lr=0.1 local.epochs=1 rounds=100 filter=none seed=2",
        "digits-specgrad local.lr=0.1 local.epochs=1 rounds=100 filter=rfft filter.ratio=0.1 seed=1",
    ]
    assert {(run.config.local.epochs, run.config.rounds) for run in runs} == {(1, 100), (5, 20)}
    assert {run.config.filter.parameters().get("ratio") for run in runs} == {None, 0.1}
    assert len({run.folder for run in runs}) == 16


def test_methods_have_overrides_and_axes_of_their_own(tmp_path: Path) -> None:
    runs = sweep_of(
        tmp_path,
        """
overrides: [rounds=3]
axes: {grid: {data.partition.alpha: [0.1, 1.0]}}
methods:
  plain:
  prox: {overrides: [local.algorithm=fedprox], axes: {grid: {local.algorithm.mu: [0.1, 0.2]}}}
""",
        "local.epochs=2",
    )
    assert shown(runs) == [
        "plain data.partition.alpha=0.1 seed=0",
        "plain data.partition.alpha=1.0 seed=0",
        "prox data.partition.alpha=0.1 local.algorithm.mu=0.1 seed=0",
        "prox data.partition.alpha=0.1 local.algorithm.mu=0.2 seed=0",
        "prox data.partition.alpha=1.0 local.algorithm.mu=0.1 seed=0",
        "prox data.partition.alpha=1.0 local.algorithm.mu=0.2 seed=0",
    ]
    assert all(run.config.rounds == 3 and run.config.local.epochs == 2 for run in runs)
    assert runs[2].arguments == [
        "rounds=3",
        "local.algorithm=fedprox",
        "local.epochs=2",
        "data.partition.alpha=0.1",
        "local.algorithm.mu=0.1",
    ]


def test_the_first_grid_of_a_tuning_is_on_its_own_seed(tmp_path: Path) -> None:
    runs = sweep_of(
        tmp_path,
        """
seeds: [1, 2, 3]
methods:
  plain:
  prox: {overrides: [local.algorithm=fedprox], tune: {over: {local.algorithm.mu: [0.1, 0.2]}}}
tune: {over: {local.lr: [0.1, 0.2]}, seed: 7, expand: true, budget: 9}
""",
    )
    assert shown(runs) == [
        "plain local.lr=0.1 seed=7",
        "plain local.lr=0.2 seed=7",
        "prox local.lr=0.1 local.algorithm.mu=0.1 seed=7",
        "prox local.lr=0.1 local.algorithm.mu=0.2 seed=7",
        "prox local.lr=0.2 local.algorithm.mu=0.1 seed=7",
        "prox local.lr=0.2 local.algorithm.mu=0.2 seed=7",
    ]


def test_the_config_is_looked_for_here_and_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "base.yaml").write_text("rounds: 4")
    monkeypatch.chdir(tmp_path)
    (run,) = sweep_of(tmp_path / "sweeps", "config: base.yaml")
    assert run.config.rounds == 4
    assert run.arguments == [str(tmp_path / "sweeps" / "base.yaml")]
    (tmp_path / "base.yaml").write_text("rounds: 5")
    (run,) = sweep_of(tmp_path / "sweeps", "config: base.yaml")
    assert (run.config.rounds, run.arguments) == (5, ["base.yaml"])
    assert "nowhere.yaml: cannot be read" in refused(tmp_path, "config: nowhere.yaml")


# YAML has no form for most control characters.
_TEXT = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
        max_leaves=5,
    )
)
def test_an_override_reads_back_as_its_value(value: Any) -> None:
    key, read = split(as_override("a.b", value))
    assert (key, read) == ("a.b", value)
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axis: {}", "axis: unknown key; did you mean axes? allowed: config, overrides, seeds, axes, methods, tune"),
        ("axes: {gird: {rounds: [1]}}", "axes.gird: unknown key; did you mean grid? allowed: grid, zip, list"),
        (
            "methods: {a: {override: []}}",
            "methods.a.override: unknown key; did you mean overrides? allowed: overrides, axes, tune",
        ),
        ("methods: {a: {tune: {seed: 1}}}", "methods.a.tune.seed: unknown key; allowed: over"),
        (
            "tune: {over: {local.lr: [1]}, buget: 3}",
            "tune.buget: unknown key; did you mean budget? allowed: over, metric, last, seed, expand, budget, "
            "grid_points, tolerance",
        ),
        ("seeds: 3", "seeds: got 3; should be a valid list"),
        ("seeds: []", "seeds: got []; List should have at least 1 item after validation, not 0"),
        ("seeds: [1, 1]", "seeds: got [1, 1]; 1 is given twice"),
        ("seeds: [-1]", "seeds.0: got -1; should be greater than or equal to 0"),
        ("axes: {grid: {rounds: 3}}", "axes.grid.rounds: got 3; should be a valid list"),
        ("axes: {grid: {rounds: [3, 3]}}", "axes.grid.rounds: got [3, 3]; 3 is given twice"),
        (
            "axes: {zip: {rounds: [3, 4], local.epochs: [1]}}",
            "axes.zip: got {'rounds': [3, 4], 'local.epochs': [1]}; the lists of a zip must be of one length; rounds "
            "has 2, local.epochs has 1",
        ),
        ("overrides: [rounds]", "overrides.0: got 'rounds'; 'rounds': an override is key=value"),
        ("tune: {over: {local.lr: [[1], 2]}}", "tune.over.local.lr: got [[1], 2]; must be different numbers or names"),
        (
            "tune: {metric: accuracy, over: {local.lr: [1]}}",
            "tune.metric: got 'accuracy'; must be a metric of metrics.jsonl, such as val_accuracy",
        ),
        *(
            (
                f"tune: {{metric: {metric}, over: {{local.lr: [1]}}}}",
                f"tune.metric: got {metric}; allowed with task classification: val_loss, val_accuracy, train_loss, "
                "client_loss_mean",
            )
            for metric in ("val_acuracy", "test_mse", "client_accuracy", "train_accuracy")
        ),
        (
            "tune: {over: {local.lr: [1, 2]}, expand: true}",
            "tune.budget: must be given with expand: how many points a method may try at most",
        ),
        ("tune: {seed: 1}", "tune.over: must be given: the keys to tune, each with its values"),
        (
            "tune: {over: {local.lr: [1]}, expand: true, budget: 9}",
            "tune.over.local.lr: got one value; give two or more, so that expand has a step, or use overrides",
        ),
        (
            "tune: {over: {local.clip_norm: [null, 1.0, 10.0]}, expand: true, budget: 9}",
            "tune.over.local.clip_norm: got numbers among other values, which expand cannot order; give numbers alone",
        ),
        ("tune:", "tune.over: must be given: the keys to tune, each with its values"),
        (
            "tune: {over: {local.lr: [1, 2, 3]}, budget: 2}",
            "tune.over: the first grid has 3 points, more than tune.budget, 2",
        ),
        (
            "tune: {over: {local.lr: [1, 2]}, grid_points: 2}\nmethods: {a: {tune: {over: {rounds: [1, 2]}}}, b: }",
            "methods.a.tune.over: the first grid has 4 points; tune.grid_points wants 2 of every method",
        ),
        (
            "methods: {a: {tune: {over: {local.lr: [1, 2]}}}}",
            "methods.a.tune: needs a tune section of the whole sweep, which says seed, metric and budget",
        ),
        (
            "axes: {grid: {local.lr: [1]}}\nmethods: {a: {axes: {zip: {local.lr: [2]}}}}",
            "methods.a.local.lr: is set twice by axes, tune.over or seeds; leave it in one place",
        ),
        (
            "axes: {grid: {seed: [1]}}\nseeds: [1]",
            "seed: is set twice by axes, tune.over or seeds; leave it in seeds",
        ),
        ("axes: {list: [{local.lr: 1}, {local.lr: 1}]}", "are the same run to a run's hash; leave out keys"),
        ("axes: {grid: {runtime.timeout_s: [10, 20]}}", "are the same run to a run's hash; leave out keys"),
        (
            "axes: {grid: {local.lr: [0.1, -1]}}",
            "digits-specgrad local.lr=-1: local.lr: got -1; should be greater than 0",
        ),
        (
            "methods: {prox: {axes: {grid: {local.algorithm.nu: [1]}}}}",
            "prox local.algorithm.nu=1: local.algorithm.nu: unknown key",
        ),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_every_wrong_case_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, "methods: {a: {overrides: [local.lr=-1]}, b: {overrides: [roundz=1]}}")
    assert "a: local.lr: got -1" in message
    assert "b: roundz: unknown key; did you mean rounds?" in message


@pytest.mark.parametrize("override", ["seed=3", "local.lr=0.1"])
def test_the_command_line_cannot_undo_the_axes(tmp_path: Path, override: str) -> None:
    message = refused(tmp_path, "seeds: [1]\naxes: {grid: {local.lr: [1]}}", override)
    assert (
        message == f"{override.split('=')[0]}: is set by the sweep itself; it cannot be overridden on the command line"
    )


def test_the_names_of_keys_that_only_place_a_run_may_differ(tmp_path: Path) -> None:
    runs = sweep_of(tmp_path, "axes: {zip: {runtime.timeout_s: [10, 20], name: [a, b]}}")
    assert len({run.folder for run in runs}) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_of_the_repository_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load_sweep(path).cases
