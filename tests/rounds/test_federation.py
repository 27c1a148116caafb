"""From a config to the federation and the model of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspec_dist.config import Config, load, methods
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.proxy import balanced_subset, class_of, proxy_share, quota
from fedspec_dist.rounds.sampling import sample_cohort

LABELS = np.array([0, 1, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0])
IDS = np.array(["f2", "f1", "f1", "f2", "g7", "f1", "g7", "f2", "f1", "h0", "h0", "h0"])
NATURAL = "{type: natural, clients: 4}"


def config_of(root: Path, *overrides: str, partition: str = NATURAL, **more: np.ndarray) -> Config:
    rng = np.random.default_rng(0)
    np.savez(
        root / "x.npz",
        train_images=rng.integers(256, size=(12, 6, 5), dtype=np.uint8),
        train_labels=LABELS,
        test_images=rng.integers(256, size=(3, 6, 5), dtype=np.uint8),
        test_labels=np.arange(3),
        **more,
    )
    data = f"data={{dataset: npz, path: {root}/x.npz, root: {root}}}"
    return load(None, [data, f"data.partition={partition}", "clients_per_round=2", *overrides])


def test_a_natural_partition_from_the_file_to_the_clients(tmp_path: Path) -> None:
    federation = load_federation(config_of(tmp_path, train_clients=IDS), prepares=True)
    assert [samples.tolist() for samples in federation.clients] == [[1, 2, 5, 8], [0, 3, 7], [4, 6], [9, 10, 11]]
    assert federation.class_counts.dtype == np.int64
    assert federation.class_counts.tolist() == [[0, 3, 1], [1, 0, 2], [1, 0, 1], [2, 1, 0]]


def test_some_of_the_natural_clients(tmp_path: Path) -> None:
    config = config_of(tmp_path, partition="{type: natural, clients: 2}", train_clients=IDS)
    federation, again = (load_federation(config, prepares=True) for _ in range(2))
    held = [sorted(set(IDS[samples])) for samples in federation.clients]
    assert [len(names) for names in held] == [1, 1]
    assert held[0] < held[1]
    assert all(np.array_equal(one, other) for one, other in zip(federation.clients, again.clients, strict=True))
    assert federation.class_counts.sum() == sum(len(samples) for samples in federation.clients)


def test_all_natural_clients_take_part_when_their_number_is_not_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for override in ("data.partition=natural", "data.partition={type: natural, clients: null}"):
        config = config_of(tmp_path, override, "clients_per_round=0.5", train_clients=IDS)
        federation = load_federation(config, prepares=True)
        assert [samples.tolist() for samples in federation.clients] == [[1, 2, 5, 8], [0, 3, 7], [4, 6], [9, 10, 11]]
        assert federation.ids is None
        assert len(sample_cohort(config, 0, federation.population)) == 2
        assert sum(len(sample_cohort(load_bernoulli(config), t, federation.population)) for t in range(50)) > 80
    with pytest.raises(ValueError, match=r"^clients_per_round: got 5, but only 4 of 4 clients have data"):
        load_federation(config_of(tmp_path, override, "clients_per_round=5", train_clients=IDS), prepares=True)
    assert "take part" not in caplog.text
    assert load(None).data.partition.clients == 20  # what other partitions have unless told


def load_bernoulli(config: Config) -> Config:
    return config.model_copy(update={"sampling": "bernoulli"})


def test_who_takes_part_of_the_natural_clients_is_said_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, partition="{type: natural, clients: 2}", train_clients=IDS)
    federation = load_federation(config, prepares=True)
    names = np.unique(IDS)
    assert federation.ids is not None
    assert [set(IDS[samples]) for samples in federation.clients] == [{names[number]} for number in federation.ids]
    used = sum(map(len, federation.clients))
    assert f"2 of the 4 clients of the data set take part, with {used} of its 12 samples" in caplog.text
    assert ", ".join(map(str, federation.ids)) in caplog.text


def test_samples_that_nobody_has_and_classes_that_do_not_occur_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    load_federation(config_of(tmp_path, partition="{type: dirichlet_balanced, clients: 5}"), prepares=True)
    assert "2 of 12 training samples belong to no client" in caplog.text
    assert "classes occur" not in caplog.text
    gaps = config_of(tmp_path, "data.num_classes=11", partition="{type: iid, clients: 5}")
    load_federation(gaps, prepares=True)
    assert "3 of 11 classes occur in the training samples (labels 0 to 2); data.renumber=true" in caplog.text


def test_natural_clients_that_are_not_there(tmp_path: Path) -> None:
    config = config_of(tmp_path, partition="{type: natural, clients: 5}", train_clients=IDS)
    with pytest.raises(ValueError, match=r"^data\.partition\.clients: 5 given; allowed is 1 to 4"):
        load_federation(config, prepares=True)
    with pytest.raises(ValueError, match=r"^data\.partition\.type: natural needs .* train_clients"):
        load_federation(config_of(tmp_path), prepares=True)


def test_class_counts_have_a_column_for_classes_nobody_has(tmp_path: Path) -> None:
    config = config_of(tmp_path, "data.num_classes=5", partition="{type: iid, clients: 3}")
    counts = load_federation(config, prepares=True).class_counts
    assert counts.shape == (3, 5)
    assert counts.sum(axis=0).tolist() == [4, 4, 4, 0, 0]


def test_the_model_has_the_seeds_parameters(tmp_path: Path) -> None:
    federation = load_federation(config_of(tmp_path, train_clients=IDS), prepares=True)

    def initial(*overrides: str) -> dict[str, torch.Tensor]:
        config = config_of(tmp_path, "model={type: mlp, hidden: [8]}", *overrides, train_clients=IDS)
        return build_model(config, federation.dataset).state_dict()

    torch.manual_seed(5)
    one = initial("model.projection=4")
    torch.manual_seed(6)
    state = torch.random.get_rng_state()
    same, other, plain = initial("model.projection=4"), initial("model.projection=4", "seed=9"), initial()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert one["fc.weight"].shape == (3, 4)
    assert one["projection.l2.weight"].shape == (4, 8)
    assert "projection.l1.weight" not in plain
    assert torch.equal(one["features.0.weight"], plain["features.0.weight"])


def test_the_projection_outlives_a_change_of_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.projection=4", "model=cnn", train_clients=IDS)
    model = build_model(config, load_federation(config, prepares=True).dataset)
    assert model.fc.in_features == 4


PHASES = "phases=[{{rounds: 1, server: {{weights: {{type: fedlaw, proxy_fraction: {}}}}}}}, {{rounds: 1{}}}]"
SMALLER = ", server: {weights: {type: fedlaw, proxy_fraction: 0.1}}"


def test_each_phase_learns_from_its_own_share_of_the_samples_held_out() -> None:
    config = load(None, [PHASES.format(0.5, SMALLER)])
    federation = load_federation(config, prepares=True)
    assert federation.proxy is not None
    everything = np.concatenate([class_of(federation.proxy), class_of(federation.dataset.test)])
    assert len(everything) == 360
    shares = [proxy_share(phase) for phase in config.schedule()]
    sizes = [len(balanced_subset(class_of(federation.proxy), quota(everything, share))) for share in shares]
    assert sizes == [180, 30]
    counts = np.bincount(class_of(federation.proxy))
    assert counts.tolist() == [18] * 10


def test_without_learned_weights_nothing_is_held_out() -> None:
    config = load(None, ["rounds=1"])
    assert load_federation(config, prepares=True).proxy is None


def test_a_test_set_that_would_be_gone_is_refused() -> None:
    settings = ["data={dataset: synthetic, num_test: 3, num_classes: 3}", "server.weights=fedlaw"]
    with pytest.raises(
        ValueError, match=r"^server\.weights\.proxy_fraction: got 0\.02, which takes all 3 test samples"
    ):
        load_federation(load(None, settings), prepares=True)


@pytest.mark.parametrize(
    "made",
    [
        [np.arange(5)] * 20,
        [np.arange(5)],
        [np.array([10_000_000]), *[np.zeros(0, dtype=np.int64)] * 19],
        [np.array([0.5]), *[np.zeros(0, dtype=np.int64)] * 19],
        [[0], *[np.zeros(0, dtype=np.int64)] * 19],
    ],
    ids=["twice", "too few", "outside", "not whole", "a list"],
)
def test_a_partition_of_a_plugin_is_checked(made: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.PARTITIONS, "iid", methods.method(f"{__name__}:_made"))
    monkeypatch.setattr(sys.modules[__name__], "_made", lambda samples, num_clients, rng: made, raising=False)
    with pytest.raises(ValueError, match=r"^data\.partition: iid did not give 20 one-dimensional arrays"):
        load_federation(load(None, ["data.partition=iid"]), prepares=True)
