"""The config: what it accepts, and what it says about the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from fedspec_dist import config as config_module
from fedspec_dist.config import Config, ConfigError, load, minutes
from fedspec_dist.config.methods import FAMILIES, LATER


def _file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_the_default_is_the_design() -> None:
    config = load()
    assert config.name == "digits-specgrad"
    assert (config.rounds, config.cohort_size(), config.data.partition.clients) == (20, 5, 20)
    assert (config.filter.type, config.filter.ratio, config.filter.layers) == ("rfft", 0.05, ["*"])
    assert config.local.algorithm.type == "fedavg"
    assert config.phases == []
    assert len(config.schedule()) == 1


def test_loading_needs_no_torch() -> None:
    code = "import sys; from fedspec_dist.config import load; load(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_states_only_differences_and_overrides_come_last(tmp_path: Path) -> None:
    path = _file(tmp_path, "rounds: 3\nlocal: {lr: 0.2}\nserver: {aggregator: fedgh}\n")
    config = load(path, ["local.lr=1e-3", "server.aggregator.mode=snapshot"])
    assert (config.rounds, config.local.lr, config.local.epochs) == (3, 0.001, 5)
    assert (config.server.aggregator.type, config.server.aggregator.mode) == ("fedgh", "snapshot")


@pytest.mark.parametrize(
    "overrides",
    [
        ["server.aggregator=fedgh"],
        ["server.aggregator={type: fedgh}"],
        ["server.aggregator.type=fedgh"],
        ["server={aggregator: fedgh}"],
        ["server.aggregator=fipa", "server.aggregator.rank=3", "server.aggregator=fedgh"],
    ],
)
def test_either_form_of_a_method_gives_its_defaults(overrides: list[str]) -> None:
    aggregator = load(None, overrides).server.aggregator
    assert aggregator.model_dump() == {"type": "fedgh", "mode": "pairwise"}


def test_another_method_drops_the_parameters_of_the_old_one_but_not_the_familys() -> None:
    settings = ["filter.layers=[fc*]", "filter=gradient_centralization"]
    config = load(None, [*settings, "data.partition.clients=7", "data.partition=iid"])
    shared = {"layers": ["fc*"], "min_size": 0, "min_dim": 1}
    assert config.filter.model_dump() == {"type": "gradient_centralization"} | shared
    assert config.data.partition.model_dump() == {"type": "iid", "clients": 7}


def test_parameters_of_the_data_set_stand_beside_it() -> None:
    config = load(None, ["data.dataset=synthetic", "data.shape=[1, 8, 8]"])
    assert config.data.dataset.shape == [1, 8, 8]
    assert config.data.dataset.num_train == 5000
    assert config.to_dict()["data"]["shape"] == [1, 8, 8]
    with pytest.raises(ConfigError, match=r"data\.shape: unknown key"):
        load(None, ["data.dataset=synthetic", "data.shape=[1, 8, 8]", "data.dataset=digits", "data.shape=[1, 8, 8]"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nosuch=1"], r"^nosuch: unknown key; allowed: name, seed"),
        (["local.learning_rate=1"], r"^local\.learning_rate: unknown key; allowed: algorithm, optimizer, lr"),
        (["filter.ratoi=1"], r"^filter\.ratoi: unknown key; did you mean ratio\? allowed: type, layers, min_size, "),
        (["filter=none", "filter.ratio=0.1"], r"^filter\.ratio: unknown key"),
        (["filter.ratio=1.5"], r"^filter\.ratio: got 1\.5; should be less than 1"),
        (["filter=5"], r"^filter: got 5"),
        (["filter.layers=[]"], r"^filter\.layers: got \[\]"),
        (["rounds=true"], r"^rounds: got True; should be a valid integer"),
        (["rounds=2.5"], r"^rounds: got 2\.5"),
        (["rounds=ten"], r"^rounds: got 'ten'; should be a valid integer"),
        (["rounds=0"], r"^rounds: got 0; should be greater than or equal to 1"),
        (["local.lr=-1"], r"^local\.lr: got -1; should be greater than 0"),
        (["local.lr=.inf"], r"^local\.lr: got inf; should be a finite number"),
        (["local=3"], r"^local: got 3"),
        (["server.aggregator=fedgg"], r"^server\.aggregator: got 'fedgg'; allowed: 'fedavg', 'fedgh', 'fipa'"),
        (["server.aggregator.mode=x"], r"^server\.aggregator\.mode: unknown key; allowed: type"),
        (["local.algorithm={type: fedprox, mu: -1}"], r"^local\.algorithm\.mu: got -1"),
        (["data.dataset=npz"], r"^data\.path: must be given"),
        (["data.dataset=mnist"], r"^data\.dataset: got 'mnist'; allowed: 'digits', 'fashion_mnist'"),
        (["data.augment=[flip, flip]"], r"^data\.augment: .* each of flip and crop at most once"),
        (["model.width=3"], r"^model\.width: got 3; should be a multiple of 2"),
        (["data.augment=[flipp]"], r"^data\.augment\.0: got 'flipp'; allowed: 'flip', 'crop'"),
        (["data.partition.alpha=0"], r"^data\.partition\.alpha: got 0"),
        (["model.norm=layer"], r"^model\.norm: got 'layer'; allowed: 'group', 'batch', 'none'"),
        (["clients_per_round=30"], r"^clients_per_round: got 30, but data\.partition\.clients is 20"),
        (["clients_per_round=2.5"], r"^clients_per_round: got 2\.5; a count is a whole number"),
        (["runtime.backend=nccl", "runtime.device=cpu"], r"^runtime\.backend: got 'nccl' with runtime\.device 'cpu'"),
        (["server.aggregator={type: fipa, damping: 0}"], r"^server\.aggregator\.damping: got 0 .*never move"),
        (["name=a/b"], r"^name: got 'a/b'"),
        (["cluster.time=4 hours"], r"^cluster\.time: got '4 hours'; must be a time such as 90m, 4h, 1d12h"),
        (["cluster.time=0m"], r"^cluster\.time: got '0m'; must be a time of at least a minute"),
        (["cluster.node=2"], r"^cluster\.node: unknown key; did you mean nodes\?"),
        (["seed=-1"], r"^seed: got -1"),
        (["rounds"], r"^'rounds': an override is key=value"),
        (["rounds=[1"], r"^rounds: '\[1' is not a YAML value"),
        (["phases.0.rounds=1"], r"^phases\.0\.rounds: phases has 0 entries"),
        (["phases=[3]"], r"^phases\.0: a phase is a mapping"),
        (["phases=[{rounds: 3}, {rounds: 2, local: {lr: -1}}]"], r"^phases\.1\.local\.lr: got -1"),
        (
            ["phases=[{rounds: 3, seed: 2}]"],
            r"^phases\.0\.seed: unknown key; did you mean server\? allowed: rounds, trainable, local",
        ),
        (["phases=[{rounds: 3}]", "rounds=7"], r"^rounds: got 7, but the phases have 3 = 3 rounds"),
        (["phases=[{local: {lr: 1}}]"], r"^phases\.0\.rounds: must be given"),
    ],
)
def test_an_error_names_the_key_what_was_given_and_what_is_allowed(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, overrides)


def test_every_wrong_key_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load(None, ["local.lr=-1", "rounds=0"])
    assert str(error.value).count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "a config is a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("rounds: 3\nrounds: 4\n", "rounds: given twice"),
        ("local: {lr: 1, lr: 2}\n", "lr: given twice"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(_file(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read as a config"):
        load(tmp_path / "gone.yaml")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load(_file(tmp_path, "")) == load()


PHASES = """
phases:
  - {rounds: 3}
  - rounds: 2
    local: {lr: 0.005}
    filter: none
    trainable: ["fc*"]
    server: {aggregator: {type: fipa, rank: 4}, weights: uniform}
"""


def test_phases_are_completed_from_the_base(tmp_path: Path) -> None:
    config = load(_file(tmp_path, PHASES))
    first, second = config.schedule()
    assert config.rounds == 5
    assert (first.local.lr, first.filter.type, first.trainable) == (0.05, "rfft", ["*"])
    assert (second.local.lr, second.local.epochs, second.filter.type) == (0.005, 5, "none")
    assert (second.server.aggregator.rank, second.server.weights.type) == (4, "uniform")
    assert second.server.optimizer.lr == 1.0


def test_a_phase_can_be_overridden(tmp_path: Path) -> None:
    config = load(_file(tmp_path, PHASES), ["phases.1.local.lr=0.5", "phases.0.rounds=9"])
    assert config.schedule()[1].local.lr == 0.5
    assert config.rounds == 11


@pytest.mark.parametrize("text", ["", PHASES, "data: {dataset: synthetic, shape: [1, 9, 9]}\n"])
def test_the_resolved_config_loads_as_itself(tmp_path: Path, text: str) -> None:
    config = load(_file(tmp_path, text))
    again = load(_file(tmp_path, config.to_yaml()))
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@pytest.mark.parametrize(
    "override",
    ["output=elsewhere", "name=other", "data.root=x", "data.download=false", "runtime.device=cpu",
     "runtime.aggregation=gather", "runtime.timeout_s=5",
     "runtime.on_nonfinite=skip", "checkpoint.every=1", "tracking.tensorboard=true"],
)  # fmt: skip
def test_what_does_not_decide_the_result_does_not_change_the_hash(override: str) -> None:
    assert load(None, [override]).fingerprint() == load().fingerprint()


@pytest.mark.parametrize(
    "override",
    ["seed=1", "rounds=21", "local.lr=0.06", "filter.ratio=0.1", "data.partition.alpha=0.2",
     "runtime.threads_per_rank=2", "trainable=['conv*']", "server.weights=uniform"],
)  # fmt: skip
def test_what_decides_the_result_changes_the_hash(override: str) -> None:
    assert load(None, [override]).fingerprint() != load().fingerprint()


@pytest.mark.parametrize(
    ("overrides", "fingerprint"),
    [
        (["filter=none"], "9d736f6d"),
        (["filter=rfft"], "561ec6fb"),
        (["filter=none", "local.algorithm=fedsam"], "ea1664be"),
        (["filter=none", "local.algorithm=mofedsam"], "3c4475d3"),
        (["filter=none", "server.weights=feddisco"], "5e9f052d"),
        (["filter=none", "phases=[{rounds: 2}, {rounds: 3, local: {lr: 0.1}}]"], "d2777936"),
    ],
)
def test_runs_from_before_an_option_came_are_found_again(overrides: list[str], fingerprint: str) -> None:
    assert load(None, overrides).fingerprint() == fingerprint


LATER_OPTIONS = [
    (key, name, option, default)
    for key, family in FAMILIES.items()
    for name in family.table
    for option, (kind, default) in family.parameters(name).items()
    if LATER in get_args(kind) and name != "none"  # which heeds no option
]


@pytest.mark.parametrize(("key", "name", "option", "default"), LATER_OPTIONS)
def test_a_later_option_decides_where_it_is_not_at_its_default(key: str, name: str, option: str, default: Any) -> None:
    required = {o: "x:y" for o, (_, default) in FAMILIES[key].parameters(name).items() if default is ...}

    def load_with(**options: Any) -> Config:
        # The parameters of a data set stand beside its name.
        above, kind = ("data", "dataset") if key == "data.dataset" else (key, "type")
        return load(None, [f"{above}={json.dumps({kind: name, **required, **options})}"])

    def given(value: Any) -> str:
        return load_with(**{option: value}).fingerprint()

    before = load_with()
    assert given(default) == before.fingerprint()
    other = {"aggregate": "freeze", "relu": "tanh", "uniform": "test"}
    assert given({bool: not default, int: 7, float: 0.25}.get(type(default)) or other[default]) != before.fingerprint()
    section = reduce(getattr, key.split("."), before)
    assert section.model_dump()[option] == default, "what is saved with a run says it all the same"


def test_a_fraction_of_clients_is_at_least_one() -> None:
    assert load(None, ["clients_per_round=0.25"]).cohort_size() == 5
    assert load(None, ["clients_per_round=0.001"]).cohort_size() == 1
    assert load(None, ["clients_per_round=1"]).cohort_size() == 1
    # 0.29 * 100 is 28.999... in binary.
    assert load(None, ["clients_per_round=0.29", "data.partition.clients=100"]).cohort_size() == 29


def test_every_section_of_the_schema_has_its_default() -> None:
    assert set(config_module.DEFAULTS) == set(Config.model_fields)


def test_a_home_that_is_not_there_is_named() -> None:
    config = load(None, ["output=~nobodyhasthisname/runs"])
    with pytest.raises(
        ConfigError, match=r"output: got '~nobodyhasthisname/runs', but no such home directory is known"
    ):
        config.run_folder()


@pytest.mark.parametrize("text", ["? [1]\n: 2", "1: 2", "null: 3", "local: {1: 2}", "model: {? {a: b} : 2}"])
def test_keys_are_names(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": a key is a name"):
        load(_file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90m", 90),
        ("4h", 240),
        ("1d12h", 2160),
        ("1h30m", 90),
        ("04:00:00", 240),
        ("1-00:00:00", 1440),
        ("00:00:30", 1),
    ],
)
def test_times_in_minutes(text: str, expected: int) -> None:
    assert minutes(text) == expected


def test_where_a_job_runs_has_no_part_in_the_run() -> None:
    assert load(None, ["cluster.nodes=4", "runtime.interface=ib0"]).fingerprint() == load(None).fingerprint()


PHASED = ["phases=[{rounds: 2}, {rounds: 3, local: {lr: 0.01}, server: {aggregator: {type: fipa, rank: 7}}}]"]


def test_a_saved_config_with_phases_can_still_be_overridden(tmp_path: Path) -> None:
    saved = _file(tmp_path, load(None, PHASED).to_yaml())
    changed = load(saved, ["phases.0.local.lr=0.5", "local.algorithm=scaffold"])
    assert [phase.local.lr for phase in changed.schedule()] == [0.5, 0.01]
    assert [phase.local.algorithm.type for phase in changed.schedule()] == ["scaffold"] * 2
    assert [phase.server.aggregator.type for phase in changed.schedule()] == ["fedavg", "fipa"]
    assert changed.fingerprint() == load(None, [*PHASED, "local.lr=0.5", "local.algorithm=scaffold"]).fingerprint()
    # What no phase uses does not make another run.
    unused = _file(tmp_path, "local: {lr: 3}\n")
    typed = [*PHASED, "phases.0.local.lr=1"]
    assert load(unused, typed).fingerprint() == load(None, typed).fingerprint()


def test_an_alias_is_a_copy(tmp_path: Path) -> None:
    text = "local: &l {lr: 0.1}\nphases:\n  - {rounds: 1, local: *l}\n  - {rounds: 2, local: *l}\n"
    config = load(_file(tmp_path, text), ["phases.0.local.lr=0.7"])
    assert [phase.local.lr for phase in config.schedule()] == [0.7, 0.1]


def test_merge_keys_of_yaml(tmp_path: Path) -> None:
    text = """
    local: &base {lr: 0.1, epochs: 3}
    phases:
      - rounds: 1
        local:
          <<: *base
          epochs: 2
    """
    (phase,) = load(_file(tmp_path, text)).schedule()
    assert (phase.local.lr, phase.local.epochs) == (0.1, 2)


@pytest.mark.parametrize("name", ["1e3", "12e5", "0123", "2024-02-30", "null", "1.5", "0x10", "true"])
def test_a_name_that_looks_like_something_else_is_read_back(name: str, tmp_path: Path) -> None:
    config = load(None, [f'name="{name}"'])
    assert load(_file(tmp_path, config.to_yaml())).name == name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds=2001-13-45", r"^rounds: got '2001-13-45'"),
        ("rounds=010", r"^rounds: got '010'"),
        ("rounds=1:30", r"^rounds: got '1:30'"),
        ('seed=!!int "x"', r"^seed: .* is not a YAML value"),
        ("runtime.timeout_s=1e300", r"^runtime\.timeout_s: got 1e\+300"),
        (f"name={'a' * 101}", r"^name: got .*at most 100 characters"),
        ("local.lr_decay=1e-20", r"^local\.lr_decay: got a decay that takes local\.lr below 1e-30"),
        ("clients_per_round=40", r"^clients_per_round: got 40, but"),
    ],
)
def test_more_that_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [override])


def test_a_config_file_is_read_alike_by_any_reader_of_yaml(tmp_path: Path) -> None:
    config = load(None, ["filter.order=0123", 'name="2024-01-01"', 'output="1e3"'])
    plain = yaml.safe_load(config.to_yaml())
    assert (plain["filter"]["order"], plain["name"], plain["output"]) == ("0123", "2024-01-01", "1e3")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("output", ["x/" * 3000, "y" * 300, "a/" + "é" * 150])
def test_a_path_that_no_file_system_takes_is_refused(output: str) -> None:
    with pytest.raises(ConfigError, match=r"^output: got .*at most 2000 bytes"):
        load(None, [f"output={output}"])
