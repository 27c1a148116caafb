from __future__ import annotations

import pytest
from torch import nn

from fedspec_dist.config import load, methods
from fedspec_dist.config.methods import MODELS
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import make_filter
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.rounds.phases import phase_of_round

MODEL = MODELS["cnn"].build((1, 8, 8), 3, width=2)
DATASET = load_federation(load(), prepares=True).dataset


def test_rounds_belong_to_phases_in_order() -> None:
    schedule = load(None, ["phases=[{rounds: 2}, {rounds: 1}, {rounds: 3}]"]).schedule()
    assert [phase_of_round(schedule, index) for index in range(6)] == [0, 0, 1, 2, 2, 2]


def test_layouts_of_all_phases() -> None:
    config = load(None, ["phases=[{rounds: 2}, {rounds: 1, trainable: ['fc.*'], filter: none}]"])
    everything, head = check_patterns(config, MODEL, DATASET)
    assert len(everything) == sum(parameter.numel() for parameter in MODEL.parameters())
    assert [segment.name for segment in head.segments] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model=resnet20", "phases=[{rounds: 1}, {rounds: 1, trainable: ['fc.*'], server: {aggregator: inco}}]"],
            r"^phases\.1\.server\.aggregator: inco",
        ),
        (["local.algorithm=moon"], r"^local\.algorithm: moon acts on features, but model\.type .* has no represent"),
    ],
)
def test_a_method_that_does_not_suit_the_model_is_found_before_the_first_round(
    overrides: list[str], message: str
) -> None:
    config = load(None, overrides)
    model = nn.Linear(3, 2) if "moon" in overrides[0] else MODELS["resnet20"].build((1, 8, 8), 3)
    with pytest.raises(ValueError, match=message):
        check_patterns(config, model, DATASET)


ON_FEATURES = [name for name, entry in methods.LOCAL_ALGORITHMS.items() if "features" in entry.needs]


@pytest.mark.parametrize("name", ON_FEATURES)
def test_a_method_that_acts_on_features_is_refused_where_none_of_them_trains(name: str) -> None:
    reason = rf"trainable: got \['fc\.\*'\], .* local\.algorithm {name} acts on: it would be FedAvg; train earlier"
    with pytest.raises(ValueError, match=f"^{reason}"):
        check_patterns(load(None, [f"local.algorithm={name}", "trainable=['fc.*']"]), MODEL, DATASET)
    second = f"phases=[{{rounds: 1}}, {{rounds: 1, trainable: ['fc.*'], local: {{algorithm: {name}}}}}]"
    with pytest.raises(ValueError, match=rf"^phases\.1\.{reason}"):
        check_patterns(load(None, [second]), MODEL, DATASET)
    check_patterns(load(None, [f"local.algorithm={name}", "trainable=['conv2.*', 'fc.*']"]), MODEL, DATASET)


@pytest.mark.parametrize("name", ON_FEATURES)
def test_a_projection_head_makes_features_but_no_levels(name: str) -> None:
    model = MODELS["cnn"].build((1, 8, 8), 3, width=2)
    model.add_projection(4)
    config = load(None, [f"local.algorithm={name}", "model.projection=4", "trainable=['projection.*', 'fc.*']"])
    if methods.LOCAL_ALGORITHMS[name].build().needs_levels:
        with pytest.raises(ValueError, match=r"^trainable: got \['projection\.\*', 'fc\.\*'\]"):
            check_patterns(config, model, DATASET)
    else:
        assert check_patterns(config, model, DATASET)


@pytest.mark.parametrize("name", [name for name in methods.FILTERS if name != "none"])
def test_a_filter_is_given_the_layers_that_are_asked_for(name: str) -> None:
    layout = ParameterLayout(MODEL)

    def given(setting: str) -> list[str]:
        config = load(None, [f"filter={{type: {name}, {setting}}}", f"server.filter={{type: {name}, {setting}}}"])
        first, second = (make_filter(choice, layout).segments for choice in (config.filter, config.server.filter))
        assert first == second
        return [segment.name for segment in first]

    everything = [segment.name for segment in layout.segments]
    assert given("min_dim: 1") == given("layers: ['*']") == everything
    assert given("min_dim: 2") == ["conv1.weight", "conv2.weight", "conv3.weight", "fc.weight"]
    assert given("min_dim: 4, layers: ['conv1*', 'fc*']") == ["conv1.weight"]
    assert given("min_size: 7") == [segment.name for segment in layout.segments if segment.size >= 7] != everything


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainable=['nosuch*']"], r"^trainable: 'nosuch\*' matches no parameter"),
        (["filter.layers=[nosuch]"], r"^filter\.layers: 'nosuch' matches no parameter"),
        (["filter.min_dim=5"], r"^filter: rfft with min_size 0 and min_dim 5 leaves no layer to filter"),
        (
            ["phases=[{rounds: 2}, {rounds: 1, server: {filter: {type: rfft, min_size: 10000000}}}]"],
            r"^phases\.1\.server\.filter: rfft with min_size 10000000 and min_dim 1 leaves no layer",
        ),
        (["phases=[{rounds: 2}, {rounds: 1, trainable: ['nosuch*']}]"], r"^phases\.1\.trainable: 'nosuch\*' matches"),
        # The layer exists, but the phase does not train it.
        (
            ["phases=[{rounds: 2}, {rounds: 1, trainable: ['fc.*'], filter: {layers: ['conv1.*']}}]"],
            r"^phases\.1\.filter\.layers: 'conv1\.\*' matches no parameter; there are: fc\.weight, fc\.bias",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_found_before_the_first_round(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_patterns(load(None, overrides), MODEL, DATASET)
