"""What is typed is used, or refused: tables over all methods, made from the table that the config is checked with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from fedspec_dist.config import Config, ConfigError, load
from fedspec_dist.config.methods import FAMILIES
from launch.axes import load_sweep

# Values that every method with such a parameter takes, and that are the default of none.
VALUES: dict[str, Any] = {
    "adaptive": True,
    "alpha": 0.25,
    "beta": 0.3,
    "beta1": 0.7,
    "beta2": 0.8,
    "clients": 17,
    "epochs": 3,
    "hidden": [9],
    "initial_accumulator": 0.4,
    "layers": ["fc*"],
    "lr": 0.35,
    "max_tries": 77,
    "min_dim": 2,
    "min_size": 3,
    "mu": 0.02,
    "norm": "none",
    "num_classes": 11,
    "order": "1023",
    "projection": 12,
    "ratio": 0.3,
    "rho": 0.15,
    "schedule": [[1, 0.3]],
    "tau": 0.6,
    "temperature": 0.45,
    "weight_decay": 0.004,
    "filter_ascent": True,
    "byzantine": 0.1,
    "factor": 2.5,
    "fraction": 0.3,
    "iterations": 7,
    "buffers": "freeze",
    "client": "who",
    "depth": 3,
    "dropout": 0.25,
    "epsilon": 0.003,
    "heads": 2,
    "label": "kind",
    "max_length": 33,
    "outputs": "tokens",
    "path": "other:file",
    "shape": [3, 4, 5],
    "size": [4, 5],
    "target": "next",
    "test": "b.csv",
    "test_fraction": 0.3,
    "train": "a.csv",
    "vocabulary_size": 77,
    "width": 8,
}
# For which there is no such value.
WITHOUT_ONE = {("data.dataset", "tokenizer"), ("data.dataset", "shape"), ("model", "hidden")}
# `server.transforms` is a chain of its methods, not a choice between them.
CHOICES = {family: row for family, row in FAMILIES.items() if family != "server.transforms"}
# What a method needs of the rest.
NEEDS = {"inco": ["model=resnet20"]}
NEEDS |= {"fednova": ["server.aggregator=fednova", "local.algorithm=fednova"]}


def _key(family: str, parameter: str) -> str:
    return f"data.{parameter}" if family == "data.dataset" else f"{family}.{parameter}"


PAIRS = [
    (family, old, new, parameter)
    for family, row in CHOICES.items()
    for old, new in itertools.permutations(row.table, 2)
    for parameter in row.parameters(old)
    if parameter in row.parameters(new) and (new != "none" or parameter not in row.common)
    if (family, parameter) not in WITHOUT_ONE
    if not (
        parameter == "norm" and "torchvision" in (old, new)
    )  # which takes batch and group, and the others' defaults are
]


def _settings(family: str, name: str, parameter: str = "") -> list[str]:
    others = [need for need in NEEDS.get(name, []) if not need.startswith(f"{family}=")]
    own = FAMILIES[family].parameters(name)
    others += [f"{_key(family, key)}=x:y" for key, (_, default) in own.items() if default is ... and key != parameter]
    return [*others, *(["filter=rfft"] if parameter == "filter_ascent" else [])]


def _file(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "base.yaml"
    path.write_text(json.dumps(content))
    return path


def _nested(family: str, value: Any) -> dict[str, Any]:
    for part in reversed(family.split(".")):
        value = {part: value}
    return value


def _of(config: Config, family: str, parameter: str) -> Any:
    return config.value(_key(family, parameter))


@pytest.mark.parametrize(("family", "parameter"), sorted({(family, parameter) for family, _, _, parameter in PAIRS}))
def test_a_parameter_is_used_whatever_the_order_and_the_layer(family: str, parameter: str, tmp_path: Path) -> None:
    """Each pair of methods that share it: named before or after it, on the command line, in a file, in a phase."""
    pairs = [(old, new) for key, old, new, shared in PAIRS if (key, shared) == (family, parameter)]
    value, typed = VALUES[parameter], f"{_key(family, parameter)}={json.dumps(VALUES[parameter])}"
    for new in {new: None for _, new in pairs}:
        rest, name = _settings(family, new, parameter), f"{family}={new}"
        for order in ([name, typed], [typed, name], [f"{family}={json.dumps({'type': new, parameter: value})}"]):
            assert _of(load(None, [*rest, *order]), family, parameter) == value, (new, order)
        if family.split(".")[0] in ("local", "filter", "server"):
            phase = ["phases=[{rounds: 2}, {rounds: 3}]", f"phases.1.{family}.{parameter}={json.dumps(value)}"]
            both = [name] if new == "fednova" else []  # with its other half
            for order in ([*phase, f"phases.1.{name}"], [f"phases.1.{name}", *phase]):
                assert _at(load(None, [*rest, *both, *order]).phases[1], family)[parameter] == value, (new, order)
    for old, new in pairs:
        rest, name = _settings(family, new, parameter), f"{family}={new}"
        in_file = _file(tmp_path, _nested(family, {"type": old, parameter: value}))
        for config in (load(in_file, [*rest, name]), load(None, [*rest, f"{family}={old}", typed, name])):
            assert config.value(family) != old
            assert _of(config, family, parameter) == value, (old, new)


def _at(phase: Any, family: str) -> dict[str, Any]:
    for part in family.split("."):
        phase = getattr(phase, part)
    return dict(phase.model_dump())


UNSHARED = [
    (family, old, new, parameter)
    for family, row in CHOICES.items()
    for old, new in itertools.permutations(row.table, 2)
    for parameter in row.parameters(old)
    if parameter not in row.parameters(new)
]


@pytest.mark.parametrize("family", sorted({family for family, *_ in UNSHARED}))
def test_a_parameter_that_the_named_method_has_not_goes_with_its_file_and_is_refused_where_it_is_typed(
    family: str, tmp_path: Path
) -> None:
    for _, old, new, parameter in [row for row in UNSHARED if row[0] == family]:
        kind, default = FAMILIES[family].parameters(old)[parameter]
        value = "x:y" if default is ... else default
        name, typed = f"{family}={new}", f"{_key(family, parameter)}={json.dumps(value)}"
        rest = _settings(family, new)
        stated = _file(tmp_path, _nested(family, {"type": old, parameter: value}))
        config = load(stated, [*rest, name])
        assert config.value(_key(family, parameter)) is None
        for order in ([name, typed], [typed, name]):
            with pytest.raises(ConfigError) as error:
                load(None, [*rest, *order])
            assert str(error.value).startswith(f"{_key(family, parameter)}: unknown key"), (order, get_args(kind))


@pytest.mark.parametrize(
    ("family", "name", "parameter"),
    [
        (family, name, parameter)
        for family, row in CHOICES.items()
        for name in row.table
        for parameter, (_, default) in row.table[name].parameters.items()
        if default is not ...
    ],
)
def test_who_names_another_method_and_no_parameter_gets_its_own_defaults(
    family: str, name: str, parameter: str
) -> None:
    config = load(None, [*_settings(family, name), f"{family}={name}"])
    assert _of(config, family, parameter) == FAMILIES[family].parameters(name)[parameter][1]


@pytest.mark.parametrize(
    "axes",
    [
        "grid: {filter.ratio: [0.1, 0.2], filter: [rfft, lapd]}",
        "grid: {filter: [rfft, lapd], filter.ratio: [0.1, 0.2]}",
        "zip: {filter.ratio: [0.1, 0.2], filter: [rfft, lapd]}",
        "list: [{filter.ratio: 0.1, filter: rfft}, {filter: {type: lapd}, filter.ratio: 0.2}]",
    ],
)
def test_the_runs_of_a_sweep_have_what_its_axes_say(axes: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"axes: {{{axes}}}\n")
    for run in load_sweep(path).first_runs():
        assert run.config.filter.ratio == run.point["filter.ratio"]
        assert run.config.filter.type == {0.1: "rfft", 0.2: "lapd"}[run.config.filter.ratio] or "grid" in axes


def test_methods_are_compared_at_the_ratio_that_the_file_states(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("filter: {type: rfft, ratio: 0.3}\n")
    path = tmp_path / "study.yaml"
    path.write_text("config: base.yaml\naxes: {grid: {filter: [rfft, lapd, gaussian]}}\n")
    runs = load_sweep(path).first_runs()
    assert [(run.config.filter.type, run.config.filter.ratio) for run in runs] == [
        ("rfft", 0.3),
        ("lapd", 0.3),
        ("gaussian", 0.3),
    ]


def test_a_tuned_parameter_and_a_tuned_method_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("tune: {over: {server.optimizer.lr: [0.1, 0.2], server.optimizer: [adam, momentum]}}\n")
    runs = load_sweep(path).first_runs()
    assert [(run.config.server.optimizer.type, run.config.server.optimizer.lr) for run in runs] == [
        ("adam", 0.1),
        ("momentum", 0.1),
        ("adam", 0.2),
        ("momentum", 0.2),
    ]


FIPA_LAST = """
phases:
  - {rounds: 3}
  - {rounds: 2, local: {lr: 0.01}, filter: none, server: {aggregator: {type: fipa, rank: 4}}}
"""


@pytest.mark.parametrize(
    ("typed", "where"),
    [
        (["local.lr=0.5"], "phases.1.local.lr"),
        (["local={lr: 0.5}"], "phases.1.local.lr"),
        (["server.aggregator=fedgh"], "phases.1.server.aggregator"),
        (["filter=lapd"], "phases.1.filter"),
        (["server={aggregator: {type: fipa, rank: 7}}"], "phases.1.server.aggregator.rank"),
    ],
)
def test_a_typed_value_that_a_phase_of_the_file_overrules_is_refused(
    typed: list[str], where: str, tmp_path: Path
) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(FIPA_LAST)
    with pytest.raises(ConfigError, match=rf"but {where} overrules it with .* in place of|but {where} overrules it"):
        load(path, typed)


@pytest.mark.parametrize(
    "typed",
    [
        ["local.lr=0.01"],  # what the phase says too
        ["local.epochs=3"],
        ["filter.ratio=0.2"],  # the other phase has no filter
        ["local.lr=0.5", "phases.1.local.lr=0.02"],
        ["phases.0.local.lr=0.5"],
        ["filter=lapd", "phases.1.filter=none"],
        ["local.lr=0.5", "phases=[{rounds: 3}, {rounds: 2, local: {lr: 0.01}}]"],
    ],
)
def test_a_typed_value_that_is_heeded_or_overruled_by_what_was_typed_itself_is_taken(
    typed: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(FIPA_LAST)
    first = load(path, typed).schedule()[0]
    expected = {"local.lr": first.local.lr, "local.epochs": first.local.epochs, "filter": first.filter.type}
    for key, value in (text.split("=") for text in typed if text.split("=")[0] in expected):
        assert str(expected[key]) == value


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["local.lr=0.5", "phases=[{rounds: 1, local: {lr: 0.1}}]"], r"^local\.lr: got 0\.5, but phases\.0\.local\.lr"),
        (["filter.ratio=0.2", "phases=[{rounds: 1, filter: none}]"], r"^filter\.ratio: got 0\.2, but no phase has"),
        (["local.epochs=3", "local.steps=7"], r"^local\.epochs: is not used, since local\.steps takes its place"),
        (["local.epochs={min: 1, max: 2}", "local.steps=7"], r"^local\.epochs\.min: is not used"),
        (["filter=none", "filter.layers=['fc*']"], r"^filter\.layers: is not used, since filter is none"),
        (["filter=none", "filter.min_dim=2"], r"^filter\.min_dim: is not used"),
        (["server.filter.layers=['fc*']"], r"^server\.filter\.layers: is not used, since server\.filter is none"),
        (["filter.ratio=0.1", "filter.schedule=[[1, 0.2]]"], r"^filter\.ratio: is not used, since filter\.schedule"),
        (["phases=[{rounds: 1}]", "phases.0.local={epochs: 2, steps: 3}"], r"^phases\.0\.local\.epochs: is not used"),
        (["filter.order=83"], r"^filter\.order: got 83"),
        (["filter.order=123"], r"^filter\.order: got 123"),
        (["local=5", "local.lr=0.1"], r"^local: got 5, and keys below it"),
        (["data.augment=[5]", "data.augment.0.padding=2"], r"^data\.augment\.0\.padding: data\.augment\.0 is 5"),
        (["phases=[{rounds: 1}]", "phases.²=1"], r"^phases: got "),
    ],
)
def test_a_typed_value_without_effect_is_refused(typed: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, typed)


def test_a_file_may_state_what_another_setting_leaves_unused(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text("local: {epochs: 3}\nfilter: {type: rfft, ratio: 0.2, layers: ['fc*']}\n")
    config = load(path, ["local.steps=7", "filter=none"])
    assert (config.local.steps, config.filter.layers) == (7, ["fc*"])


def test_a_place_in_a_list_that_is_typed_too() -> None:
    for order in (
        ["data.augment=[crop]", "data.augment.0.padding=2"],
        ["data.augment.0.padding=2", "data.augment=[crop]"],
    ):
        (crop,) = load(None, order).data.augment
        assert (crop.type, crop.padding) == ("crop", 2)


def test_a_whole_entry_that_is_typed_takes_the_place_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(FIPA_LAST)
    config = load(path, ["phases.1={rounds: 4}", "phases.1.local.epochs=2"])
    assert (config.rounds, config.phases[1].local.lr, config.phases[1].local.epochs) == (7, 0.05, 2)
    assert config.phases[1].server.aggregator.type == "fedavg"


@pytest.mark.parametrize(
    ("typed", "size", "mean"), [("1", 1, 1.0), ("1.0", 20, 20.0), ("0.1", 2, 2.0), ("0.5", 10, 10.0), ("20", 20, 20.0)]
)
def test_a_whole_number_of_clients_is_a_count_and_any_other_a_share(
    typed: str, size: int, mean: float, tmp_path: Path
) -> None:
    config = load(None, [f"clients_per_round={typed}"])
    assert (config.cohort_size(), config.mean_cohort()) == (size, mean)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = load(path)
    assert again == config
    assert type(again.clients_per_round) is type(config.clients_per_round)
    assert again.fingerprint() == config.fingerprint()
    assert json.loads(json.dumps(config.to_dict()))["clients_per_round"] == json.loads(typed)


def test_one_client_and_all_clients_are_different_runs(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("axes: {grid: {clients_per_round: [0.1, 0.5, 1.0, 1]}}\n")
    runs = load_sweep(path).first_runs()
    assert [run.config.cohort_size() for run in runs] == [2, 10, 20, 1]
    assert len({run.folder for run in runs}) == 4


@pytest.mark.parametrize("value", ["5.0", "2.5", "0", "0.0", "-1", "true", "x", ".nan", ".inf", "1e-60x", "null"])
def test_what_is_neither_a_count_nor_a_share_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^clients_per_round: got .*; a count is a whole number from 1"):
        load(None, [f"clients_per_round={value}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.transforms=fedgh", "server.transforms.norm=1.0"], "norm: unknown key"),
        (["server.transforms=[{type: fedgh, norm: 1.0}]"], "norm: unknown key"),
        (["clients.attack.fraction=0.3"], r"^clients\.attack\.fraction: is not used"),
    ],
)
def test_what_a_chain_or_an_attack_does_not_use_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, overrides)


def test_one_transform_may_stand_without_the_list_its_parameters_in_any_order() -> None:
    order = ["server.transforms=clip", "server.transforms.norm=0.5"]
    for typed in (order, order[::-1]):
        (transform,) = load(None, typed).server.transforms
        assert (transform.type, transform.norm) == ("clip", 0.5)
