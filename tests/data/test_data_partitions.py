"""Partitions: the numbers of the specification, and what holds for every one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspec_dist.data import partitions
from fedspec_dist.data.digits import Digits
from fedspec_dist.data.partitions import capped_shares, class_counts, cut_points
from fedspec_dist.methods import PARTITIONS
from fedspec_dist.seeding import generator


def test_cut_points_of_the_specification() -> None:
    cuts = cut_points(np.array([0.25, 0.33, 0.42]), 10)
    assert cuts.tolist() == [2, 5]
    assert [len(piece) for piece in np.split(np.arange(10), cuts)] == [2, 3, 5]


def test_full_clients_get_nothing_as_in_the_specification() -> None:
    shares = capped_shares(np.array([0.5, 0.3, 0.2]), np.array([20, 5, 30]), cap=60 / 3)
    assert shares.tolist() == [0, 1, 0]


def test_capped_shares_that_underflow_are_zero_not_nan() -> None:
    assert capped_shares(np.array([1.0, 0.0]), np.array([9, 1]), cap=5).tolist() == [0, 0]


@given(
    kind=st.sampled_from(sorted(PARTITIONS)),
    num_clients=st.integers(1, 9),
    num_samples=st.integers(60, 120),
    num_classes=st.integers(1, 7),
    alpha=st.sampled_from([1e-300, 1e-6, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_every_partition(
    kind: str, num_clients: int, num_samples: int, num_classes: int, alpha: float, seed: int
) -> None:
    labels = np.random.default_rng(seed).integers(num_classes, size=num_samples)
    parameters = {"dirichlet": {"alpha": alpha, "min_size": 0}, "dirichlet_balanced": {"alpha": alpha}}
    clients, again = (
        PARTITIONS[kind].build(labels, num_clients, generator(seed, "partition"), **parameters.get(kind, {}))
        for _ in range(2)
    )

    assert len(clients) == num_clients
    together = np.concatenate(clients)
    assert len(set(together.tolist())) == len(together)
    assert all(indices.dtype == np.int64 and (np.diff(indices) > 0).all() for indices in clients)
    assert all(np.array_equal(one, other) for one, other in zip(clients, again, strict=True))
    sizes = [len(indices) for indices in clients]
    if kind == "dirichlet_balanced":
        assert sizes == [num_samples // num_clients] * num_clients
    else:
        assert sorted(together.tolist()) == list(range(num_samples))
    if kind == "iid":
        assert max(sizes) - min(sizes) <= 1
    counts = class_counts(labels, clients, num_classes)
    assert counts.sum(axis=1).tolist() == sizes


def test_class_counts() -> None:
    labels = np.array([0, 1, 1, 2, 0])
    counts = class_counts(labels, [np.array([0, 1, 2]), np.array([], dtype=np.int64), np.array([4])], 3)
    assert counts.tolist() == [[1, 2, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
def test_another_seed_gives_another_partition(kind: str) -> None:
    labels = np.repeat(np.arange(10), 100)
    one, other = (PARTITIONS[kind].build(labels, 5, generator(seed, "partition")) for seed in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_iid_is_not_in_file_order() -> None:
    clients = partitions.iid(np.zeros(100, np.int64), 2, np.random.default_rng(0))
    assert clients[0].tolist() != list(range(50))


def test_shards_give_a_client_few_classes() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    clients = partitions.shards(labels, 30, np.random.default_rng(1), shards_per_client=2)
    counts = class_counts(labels, clients, 10)
    assert (counts.sum(axis=1) == 20).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert ((counts > 0).sum(axis=1) == 2).any()


@pytest.mark.parametrize("alpha", [0.1, 100.0])
def test_dirichlet_concentration(alpha: float) -> None:
    labels = np.repeat(np.arange(10), 500)
    clients = partitions.dirichlet(labels, 10, np.random.default_rng(0), alpha=alpha)
    shares = class_counts(labels, clients, 10) / np.array([[len(indices)] for indices in clients])
    assert (shares.max(axis=1).mean() > 0.4) == (alpha < 1)
    assert (np.abs(shares - 0.1).max() < 0.1) == (alpha > 1)


def test_dirichlet_keeps_the_minimum_and_the_cap() -> None:
    labels = np.repeat(np.arange(10), 5000)
    sizes = [len(c) for c in partitions.dirichlet(labels, 100, np.random.default_rng(0), alpha=0.1)]
    assert min(sizes) >= 10
    # Below the cap before its last class, a client can at most get that whole class on top.
    assert max(sizes) < 500 + 5000


def test_dirichlet_default_suits_the_default_data_set(tmp_path) -> None:
    labels = Digits(tmp_path, False, 0).load().train_labels
    for seed in range(20):
        sizes = [len(c) for c in partitions.dirichlet(labels, 20, generator(seed, "partition"))]
        assert sum(sizes) == 1437
        assert min(sizes) >= 10


def test_dirichlet_with_tiny_alpha_and_no_minimum_leaves_clients_empty() -> None:
    labels = np.repeat(np.arange(3), 100)
    clients = partitions.dirichlet(labels, 6, np.random.default_rng(0), alpha=1e-6, min_size=0)
    assert sorted(len(indices) for indices in clients) == [0, 0, 0, 100, 100, 100]


def test_dirichlet_says_what_to_change_when_draws_run_out() -> None:
    labels = np.repeat(np.arange(10), 5000)
    with pytest.raises(ValueError, match=r"alpha=0.05 gave none of 7 .* 100 clients .* min_size=10 of 50000"):
        partitions.dirichlet(labels, 100, np.random.default_rng(0), alpha=0.05, max_tries=7)


def test_dirichlet_says_at_once_when_the_minimum_is_out_of_reach() -> None:
    with pytest.raises(ValueError, match=r"min_size: 10 given, but 99 .* over 10 clients allow 0 to 9"):
        partitions.dirichlet(np.zeros(99, np.int64), 10, np.random.default_rng(0))


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet_balanced"])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(kind: str, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"data.partition.alpha: .* given; allowed is any number above 0"):
        PARTITIONS[kind].build(np.zeros(99, np.int64), 2, np.random.default_rng(0), alpha=alpha)


@pytest.mark.parametrize(
    ("kind", "num_clients"),
    [("iid", 100), ("dirichlet_balanced", 100), ("shards", 50), ("iid", 0), ("dirichlet", 0)],
)
def test_more_clients_than_samples(kind: str, num_clients: int) -> None:
    with pytest.raises(ValueError, match=r"data\.partition.*given; allowed is"):
        PARTITIONS[kind].build(np.zeros(99, np.int64), num_clients, np.random.default_rng(0))


def test_shards_per_client_must_be_positive() -> None:
    with pytest.raises(ValueError, match="shards_per_client: 0 given; allowed is at least 1"):
        partitions.shards(np.zeros(9, np.int64), 2, np.random.default_rng(0), shards_per_client=0)


def test_balanced_expected_share_follows_prior_times_what_is_left() -> None:
    labels = np.repeat([0, 1], [300, 100])
    prior = np.array([0.5, 0.5])
    rng = np.random.default_rng(0)
    candidates = np.arange(400)
    drawn = [partitions._draw_weighted(candidates, prior, labels, 4, rng) for _ in range(2000)]
    assert np.mean(labels[np.concatenate(drawn)]) == pytest.approx(0.25, abs=0.02)


def test_balanced_tops_up_from_the_unassigned() -> None:
    labels = np.array([0, 0, 1, 1, 1, 1])
    chosen = partitions._draw_weighted(np.arange(6), np.array([1.0, 0.0]), labels, 4, np.random.default_rng(0))
    assert {0, 1} < set(chosen.tolist())
    assert len(set(chosen.tolist())) == 4
    # No weight at all, as for a client whose only class is used up.
    chosen = partitions._draw_weighted(np.arange(2, 6), np.array([1.0, 0.0]), labels, 3, np.random.default_rng(0))
    assert len(set(chosen.tolist()) & {2, 3, 4, 5}) == 3


def test_a_sample_given_twice_is_noticed() -> None:
    with pytest.raises(AssertionError, match="two clients"):
        partitions._checked([np.array([0, 1]), np.array([1])], 2)
    with pytest.raises(AssertionError, match="no client"):
        partitions._checked([np.array([0])], 2)
