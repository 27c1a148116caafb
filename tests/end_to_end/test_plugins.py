"""Networks, data, tasks and methods outside the package: the examples of docs/your-own.md, taken from the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedspec_dist.config import ConfigError, load, methods
from tests.end_to_end.cli import ROOT, Job, results_of, run

PAGE = (ROOT / "docs" / "your-own.md").read_text()
MODULES = dict(re.findall(r"<!-- (my_\w+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    command.split(" -m fedspec_dist.main ")
    for command in re.findall(r"<!-- command -->\n```\n(.*?)\n```", PAGE, re.DOTALL)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in MODULES.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_the_page_has_short_examples() -> None:
    assert list(MODULES) == ["my_nets.py", "my_data.py", "my_task.py", "my_methods.py", "my_weights.py"]
    assert all(len(content.splitlines()) <= 30 for content in MODULES.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5), ids=list(MODULES))
def test_an_example_on_the_page_runs_with_the_same_bits_on_two_ranks_and_on_one(number: int, folder: Path) -> None:
    launcher, arguments = COMMANDS[number]
    with Job([*shlex.split(launcher), "-m", "fedspec_dist.main", *shlex.split(arguments)], folder, {}) as job:
        job.wait().expect(0, "finished")
    together = results_of(folder)
    run(folder, *shlex.split(arguments), "output=alone").expect(0, "finished")
    assert results_of(folder, "alone") == together


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
