"""The hash that names a run's folder: which keys have a part in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedspec_dist.config import DEFAULTS, load, methods

PAGE = Path(__file__).parents[1] / "docs" / "reproducibility.md"
LISTED = set(
    re.findall(r"`([\w.]+)`", PAGE.read_text().split("<!-- without a part in the hash -->")[1].split("<!-- end -->")[0])
)

# Another value for every key; of lists and mappings too.
OTHER: dict[str, Any] = {
    "name": "other", "seed": 3, "output": "elsewhere", "plugins": "[json]",
    "data.dataset": "fashion_mnist", "data.root": "here", "data.download": "false", "data.partition": "iid",
    "data.augment": "[flip]", "data.holdout": 0.1, "data.bins": 4, "task": "regression",
    "init": "{weights: x.safetensors}", "local.optimizer": "adam", "local.drop_last": "true",
    "local.schedule": "[{epochs: 2, train: ['fc*']}]", "local.keep": "['fc*']", "server.shared": "['fc*']",
    "eval.on": "[clients]", "runtime.dtype": "float64", "runtime.clients_per_batch": 3,
    "model": "lenet", "trainable": "['fc*']", "rounds": 7, "clients_per_round": 4,
    "sampling": "bernoulli", "dropout": 0.1,
    "local.algorithm": "scaffold", "local.lr": 0.3, "local.lr_decay": 0.9, "local.momentum": 0.5,
    "local.weight_decay": 0.1, "local.clip_norm": 1.0, "local.epochs": 2, "local.steps": 3, "local.batch_size": 7,
    "filter": "none", "server.aggregator": "fedgh", "server.weights": "uniform", "server.filter": "lapd",
    "server.optimizer": "adam", "server.transforms": "[fedgh]",
    "clients.attack": "sign_flip", "phases": "[{rounds: 3}, {rounds: 4, trainable: ['fc*']}]",
    "eval.every": 2, "eval.batch_size": 10, "checkpoint.every": 2, "checkpoint.keep": 3,
    "tracking.tensorboard": "true",
    "runtime.device": "cpu", "runtime.backend": "gloo", "runtime.aggregation": "gather",
    "runtime.executor": "sequential", "runtime.threads_per_rank": 2, "runtime.deterministic": "true",
    "runtime.timeout_s": 7, "runtime.precision": "tf32",
    "runtime.on_nonfinite": "skip", "runtime.sketch_memory_mb": 9, "runtime.interface": "ib0",
    "cluster.nodes": 2, "cluster.gpus_per_node": 1, "cluster.ranks_per_node": 2, "cluster.cpus_per_rank": 2,
    "cluster.mem_gb": 3, "cluster.time": "2h", "cluster.partition": "gpu", "cluster.account": "me",
    "cluster.qos": "low",
    "cluster.constraint": "a100", "cluster.exclude": "node1", "cluster.array_parallelism": 3, "cluster.extra": "{a: b}",
    "cluster.max_requeues": 3, "cluster.requeue_on_failure": 3, "cluster.signal_before_s": 3,
}  # fmt: skip


def keys_of(section: dict[str, Any], prefix: str = "") -> list[str]:
    nested = {key: value for key, value in section.items() if isinstance(value, dict) and value}
    return [f"{prefix}{key}" for key in section if key not in nested] + [
        dotted for key, value in nested.items() for dotted in keys_of(value, f"{prefix}{key}.")
    ]


@pytest.mark.parametrize("key", keys_of(DEFAULTS))
def test_a_key_decides_or_is_listed_as_one_that_does_not(key: str) -> None:
    rest = ["server.shared=['conv*']"] if key == "local.keep" else []
    other, before = load(None, [*rest, f"{key}={OTHER[key]}"]), load(None, rest)
    assert other != before
    listed = key in LISTED or key.split(".")[0] in LISTED
    assert (other.fingerprint() == before.fingerprint()) == listed


def test_every_key_that_the_page_lists_is_one() -> None:
    keys = set(keys_of(DEFAULTS))
    assert keys | {key.split(".")[0] for key in keys} >= LISTED
    assert len(LISTED) > 15


@pytest.mark.parametrize(
    ("family", "name", "parameter"),
    [
        (family, name, parameter)
        for family, row in methods.FAMILIES.items()
        for name in row.table
        for parameter, (_, default) in row.table[name].parameters.items()
        if isinstance(default, (int, float)) and not isinstance(default, bool)
    ],
)
def test_every_number_of_a_method_decides(family: str, name: str, parameter: str) -> None:
    def given(value: float) -> str:
        half = ["server.aggregator=fednova"] if name == "fednova" else []
        half += ["model=resnet20"] if name == "inco" else []
        key = "data" if family == "data.dataset" else family
        own = methods.FAMILIES[family].parameters(name)
        half += [f"{key}.{other}=x" for other, (_, default) in own.items() if default is ...]
        half += ["local.algorithm.adaptive=true"] if parameter == "eta" else []
        if family == "server.transforms":  # a chain, not a choice
            first = "clip, " if name == "noise" else ""
            return load(None, [f"server.transforms=[{first}{{type: {name}, {parameter}: {value}}}]"]).fingerprint()
        key = "data" if family == "data.dataset" else family
        return load(None, [*half, f"{family}={name}", f"{key}.{parameter}={value}"]).fingerprint()

    default = methods.FAMILIES[family].parameters(name)[parameter][1]
    other = default * 0.8 + 0.003 if isinstance(default, float) else {0: 1, 1: 2, 2: 1}.get(default, default - 2)
    assert given(default) != given(other)


def test_the_memory_of_sketches_decides_where_there_are_sketches() -> None:
    fipa = ["server.aggregator=fipa"]
    later = ["phases=[{rounds: 2}, {rounds: 3, server: {aggregator: fipa}}]"]
    for settings in (fipa, later):
        with_less = load(None, [*settings, "runtime.sketch_memory_mb=9"])
        assert with_less.fingerprint() != load(None, settings).fingerprint()


def test_of_a_plugins_aggregator_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.AGGREGATORS, "mine", methods.method("my_module:Mine"))
    settings = ["server.aggregator=mine"]
    assert load(None, settings).fingerprint() != load(None, [*settings, "runtime.sketch_memory_mb=9"]).fingerprint()


@pytest.mark.parametrize(
    ("overrides", "fingerprint"),
    [
        (["clients_per_round=10"], "2e24d1f9"),
        (["clients_per_round=0.5"], "fa8ddb3e"),
        (["server.aggregator=fipa", "eval.every=1", "runtime.executor=auto"], "2000cad2"),
        (["server.optimizer=adam", "data.partition=dirichlet_balanced", "model=resnet20"], "00522fae"),
        (["data.dataset=npz", "data.path=a.npz", "phases=[{rounds: 1}, {rounds: 2, filter: none}]"], "df17ce33"),
    ],
)
def test_runs_from_before_are_found_again(overrides: list[str], fingerprint: str) -> None:
    assert load(None, overrides).fingerprint() == fingerprint
