"""A method outside the package: CONTRIBUTING's example, taken from the page, loaded through `plugins`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedspec_dist.config import ConfigError, load, methods
from tests.end_to_end.cli import ROOT, Job, results_of, run

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
(MODULE,) = re.findall(r"<!-- my_methods.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)
(DATA,) = re.findall(r"<!-- my_data.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    command.split(" -m fedspec_dist.main ")
    for command in re.findall(r"<!-- command -->\n```\n(.*?)\n```", PAGE, re.DOTALL)
]
(LAUNCHER, ARGUMENTS), (_, DATA_ARGUMENTS) = COMMANDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_methods.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_the_example_on_the_page_runs_with_the_same_bits_on_two_ranks_and_on_one(folder: Path) -> None:
    with Job([*shlex.split(LAUNCHER), "-m", "fedspec_dist.main", *shlex.split(ARGUMENTS)], folder, {}) as job:
        job.wait().expect(0, "finished")
    together = results_of(folder)
    run(folder, *shlex.split(ARGUMENTS), "output=alone").expect(0, "finished")
    assert results_of(folder, "alone") == together
    run(folder, "rounds=2", "output=fedavg").expect(0)
    assert results_of(folder, "fedavg")[0] != together[0]


@pytest.mark.slow
def test_the_data_set_on_the_page_runs_with_the_same_bits_on_two_ranks_and_on_one(folder: Path) -> None:
    (folder / "my_data.py").write_text(DATA)
    rng = np.random.default_rng(0)
    for split, num in (("train", 1600), ("test", 40)):
        labels = np.arange(num) % 10
        pixels = rng.integers(17, size=(num, 64)) + labels[:, None]
        np.savetxt(folder / f"{split}.csv", np.column_stack([labels, pixels]), delimiter=",")
    with Job([*shlex.split(LAUNCHER), "-m", "fedspec_dist.main", *shlex.split(DATA_ARGUMENTS)], folder, {}) as job:
        job.wait().expect(0, "finished")
    together = results_of(folder)
    run(folder, *shlex.split(DATA_ARGUMENTS), "output=alone").expect(0, "finished")
    assert results_of(folder, "alone") == together
    shorter = shlex.split(DATA_ARGUMENTS.replace("rounds=2", "rounds=1"))
    (folder / "train.csv").write_text("1,2,3\n4,5,6\n")
    run(folder, *shorter).expect(1)
    (folder / "train.csv").write_text((folder / "test.csv").read_text().replace("0.000000000000000000e+00", "nan"))
    run(folder, *shorter, "name=nan").expect(1, "data.dataset: lines: train")


@pytest.mark.slow
def test_a_wrong_parameter_of_ones_own_method_is_refused_like_any_other(folder: Path) -> None:
    wrong = ["plugins=[my_methods]", "local.algorithm={type: normalized_sgd, pul: 0.1}"]
    run(folder, *wrong).expect(2, "local.algorithm.pul: unknown key; did you mean pull? allowed: type, epsilon, pull")
    run(folder, *wrong[:1], "local.algorithm={type: normalized_sgd, pull: -1}").expect(
        2, "local.algorithm.pull: got -1"
    )
    run(folder, "local.algorithm=normalized_sgd").expect(2, "local.algorithm: got 'normalized_sgd'; allowed: 'fedavg'")


def test_a_plugin_that_cannot_be_imported_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^plugins: 'no_such_module' could not be imported \(ModuleNotFoundError"):
        load(None, ["plugins=[no_such_module]"])


def test_a_plugins_method_is_checked_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "light_methods.py").write_text(
        "from fedspec_dist.config.methods import NotNegative, register\n"
        "register('server.aggregator', 'mine', 'nowhere:Mine', mu=(NotNegative, 0.5))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(methods.AGGREGATORS, "mine", None)  # for it to be gone after the test,
    del methods.AGGREGATORS["mine"]  # and not there before
    config = load(None, ["plugins=[light_methods]", "server.aggregator=mine"])
    assert config.server.aggregator.model_dump() == {"type": "mine", "mu": 0.5}
    assert config.fingerprint() != load(None).fingerprint()
    with pytest.raises(ConfigError, match=r"^server\.aggregator\.mu: got -1"):
        load(None, ["plugins=[light_methods]", "server.aggregator={type: mine, mu: -1}"])


def test_names_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.WEIGHTS, "mine", methods.method("mine:A"))
    methods.register("server.weights", "mine", "mine:A")  # the same again: a module may be imported twice
    with pytest.raises(ValueError, match=r"^register: server\.weights 'mine' is taken by mine:A; choose another name"):
        methods.register("server.weights", "mine", "mine:B")
    with pytest.raises(ValueError, match=r"^register: server\.weights 'samples' is taken by \.server\.weights"):
        methods.register("server.weights", "samples", "mine:B")
    with pytest.raises(ValueError, match=r"^register: no family 'weights'; there are: data\.dataset"):
        methods.register("weights", "mine", "mine:A")
