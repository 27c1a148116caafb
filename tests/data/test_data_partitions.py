"""Partitions: the numbers of the specification, and what holds for every one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspec_dist.config.methods import PARTITIONS
from fedspec_dist.core.seeding import generator
from fedspec_dist.data import partitions
from fedspec_dist.data.images.digits import Digits
from fedspec_dist.data.partitions import Samples, by_dirichlet, class_counts
from fedspec_dist.data.partitions.by_dirichlet import capped_shares, cut_points
from fedspec_dist.data.partitions.label_blind import apportioned
from fedspec_dist.data.partitions.samples import checked, target_bins


def test_cut_points_of_the_specification() -> None:
    cuts = cut_points(np.array([0.25, 0.33, 0.42]), 10)
    assert cuts.tolist() == [2, 5]
    assert [len(piece) for piece in np.split(np.arange(10), cuts)] == [2, 3, 5]


def test_full_clients_get_nothing_as_in_the_specification() -> None:
    shares = capped_shares(np.array([0.5, 0.3, 0.2]), np.array([20, 5, 30]), cap=60 / 3)
    assert shares.tolist() == [0, 1, 0]


def test_capped_shares_that_underflow_are_zero_not_nan() -> None:
    assert capped_shares(np.array([1.0, 0.0]), np.array([9, 1]), cap=5).tolist() == [0, 0]


# What a partition promises: all samples are given out; the sizes differ by at most one.
GIVES_ALL = {"iid", "shards", "dirichlet", "dirichlet_uncapped", "quantity_skew", "pathological", "natural"}
EQUAL_SIZES = {"iid", "dirichlet_balanced"}


def with_ids(labels: np.ndarray, num_ids: int = 5) -> Samples:
    """Every id has a sample."""
    return Samples(labels, np.random.default_rng(1).permutation(np.arange(len(labels)) % num_ids))


@given(
    kind=st.sampled_from(sorted(PARTITIONS)),
    num_clients=st.integers(1, 9),
    num_samples=st.integers(60, 120),
    num_classes=st.integers(1, 7),
    spread=st.sampled_from([1e-300, 1e-6, 0.1, 1.0, 1e6, 1e300]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_every_partition(
    kind: str, num_clients: int, num_samples: int, num_classes: int, spread: float, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.arange(num_samples) % num_classes)
    samples = with_ids(labels, num_clients)
    parameters: dict[str, dict] = {
        "dirichlet": {"alpha": spread, "min_size": 0},
        "dirichlet_uncapped": {"alpha": spread},
        "dirichlet_balanced": {"alpha": spread},
        "quantity_skew": {"sigma": spread},
        "pathological": {"classes_per_client": (num_classes + 1) // 2},
    }
    clients, again = (
        PARTITIONS[kind].build(samples, num_clients, generator(seed, "partition"), **parameters.get(kind, {}))
        for _ in range(2)
    )

    assert len(clients) == num_clients
    together = np.concatenate(clients)
    assert len(set(together.tolist())) == len(together)
    assert all(indices.dtype == np.int64 and (np.diff(indices) > 0).all() for indices in clients)
    assert all(np.array_equal(one, other) for one, other in zip(clients, again, strict=True))
    sizes = [len(indices) for indices in clients]
    # A single client with half of the classes leaves the others out.
    if kind in GIVES_ALL and not (kind == "pathological" and num_clients == 1 and num_classes > 1):
        assert sorted(together.tolist()) == list(range(num_samples))
    if kind in EQUAL_SIZES:
        assert max(sizes) - min(sizes) <= 1
    if kind == "dirichlet_balanced":
        assert sizes == [num_samples // num_clients] * num_clients
    counts = class_counts(labels, clients, num_classes)
    assert counts.sum(axis=1).tolist() == sizes


def test_every_partition_promises_something() -> None:
    assert set(PARTITIONS) == GIVES_ALL | EQUAL_SIZES


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
def test_labels_may_miss_classes(kind: str) -> None:
    labels = np.repeat([1, 4], 50)
    samples = with_ids(labels)
    clients = PARTITIONS[kind].build(samples, 5, np.random.default_rng(0))
    assert sorted(np.concatenate(clients).tolist()) == list(range(100))
    assert class_counts(labels, clients, 6).sum(axis=0).tolist() == [0, 50, 0, 0, 50, 0]


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet_uncapped", "dirichlet_balanced"])
def test_a_large_alpha_gives_every_client_every_class_alike(kind: str) -> None:
    labels = np.repeat(np.arange(10), 500)
    clients = PARTITIONS[kind].build(Samples(labels), 5, np.random.default_rng(0), alpha=1e6)
    # Samples drawn one by one have counts with a standard deviation of 9, cut proportions hardly any.
    tolerance = 40 if kind == "dirichlet_balanced" else 2
    assert np.abs(class_counts(labels, clients, 10) - 100).max() <= tolerance


def test_class_counts() -> None:
    labels = np.array([0, 1, 1, 2, 0])
    counts = class_counts(labels, [np.array([0, 1, 2]), np.array([], dtype=np.int64), np.array([4])], 3)
    assert counts.tolist() == [[1, 2, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
def test_another_seed_gives_another_partition(kind: str) -> None:
    samples = with_ids(np.repeat(np.arange(10), 100), 10)
    one, other = (PARTITIONS[kind].build(samples, 5, generator(seed, "partition")) for seed in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_iid_is_not_in_file_order() -> None:
    clients = partitions.iid(Samples(np.zeros(100, np.int64)), 2, np.random.default_rng(0))
    assert clients[0].tolist() != list(range(50))


def test_shards_give_a_client_few_classes() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    clients = PARTITIONS["shards"].build(Samples(labels), 30, np.random.default_rng(1), shards_per_client=2)
    counts = class_counts(labels, clients, 10)
    assert (counts.sum(axis=1) == 20).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert ((counts > 0).sum(axis=1) == 2).any()


@pytest.mark.parametrize("alpha", [0.1, 100.0])
def test_dirichlet_concentration(alpha: float) -> None:
    labels = np.repeat(np.arange(10), 500)
    clients = PARTITIONS["dirichlet"].build(Samples(labels), 10, np.random.default_rng(0), alpha=alpha)
    shares = class_counts(labels, clients, 10) / np.array([[len(indices)] for indices in clients])
    assert (shares.max(axis=1).mean() > 0.4) == (alpha < 1)
    assert (np.abs(shares - 0.1).max() < 0.1) == (alpha > 1)


def test_dirichlet_keeps_the_minimum_and_the_cap() -> None:
    labels = np.repeat(np.arange(10), 5000)
    sizes = [len(c) for c in PARTITIONS["dirichlet"].build(Samples(labels), 100, np.random.default_rng(0), alpha=0.1)]
    assert min(sizes) >= 10
    # Below the cap before its last class, a client can at most get that whole class on top.
    assert max(sizes) < 500 + 5000


def test_dirichlet_default_suits_the_default_data_set(tmp_path) -> None:
    labels = Digits(tmp_path, False, 0).load().train_labels
    for seed in range(20):
        sizes = [len(c) for c in PARTITIONS["dirichlet"].build(Samples(labels), 20, generator(seed, "partition"))]
        assert sum(sizes) == 1437
        assert min(sizes) >= 10


def test_dirichlet_with_tiny_alpha_and_no_minimum_leaves_clients_empty() -> None:
    labels = np.repeat(np.arange(3), 100)
    clients = PARTITIONS["dirichlet"].build(Samples(labels), 6, np.random.default_rng(0), alpha=1e-6, min_size=0)
    assert sorted(len(indices) for indices in clients) == [0, 0, 0, 100, 100, 100]


def test_dirichlet_says_what_to_change_when_draws_run_out() -> None:
    labels = np.repeat(np.arange(10), 5000)
    with pytest.raises(ValueError, match=r"alpha=0.05 gave none of 7 .* 100 clients .* min_size=10 of 50000"):
        PARTITIONS["dirichlet"].build(Samples(labels), 100, np.random.default_rng(0), alpha=0.05, max_tries=7)


def test_dirichlet_says_at_once_when_the_minimum_is_out_of_reach() -> None:
    with pytest.raises(ValueError, match=r"min_size: 10 given, but 99 .* over 10 clients allow 0 to 9"):
        PARTITIONS["dirichlet"].build(Samples(np.zeros(99, np.int64)), 10, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("kind", "num_clients"),
    [
        *[("iid", 100), ("dirichlet_balanced", 100), ("shards", 50)],
    ],
)
def test_more_clients_than_samples(kind: str, num_clients: int) -> None:
    with pytest.raises(ValueError, match=r"data\.partition.*given; allowed is"):
        PARTITIONS[kind].build(Samples(np.zeros(99, np.int64)), num_clients, np.random.default_rng(0))


def test_quantity_skew_needs_a_sample_for_each_client() -> None:
    with pytest.raises(ValueError, match=r"min_size: 1 given, but 99 .* over 100 clients allow 0 to 0; lower it or"):
        PARTITIONS["quantity_skew"].build(Samples(np.zeros(99, np.int64)), 100, np.random.default_rng(0))


# --- pathological


@given(
    num_clients=st.integers(1, 12),
    num_classes=st.integers(1, 8),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_pathological_deals_classes_evenly(num_clients: int, num_classes: int, share: float, seed: int) -> None:
    per_client = 1 + int(share * (num_classes - 1))
    rng = np.random.default_rng(seed)
    sizes_of_classes = rng.integers(num_clients, 60, size=num_classes)
    labels = rng.permutation(np.repeat(np.arange(num_classes), sizes_of_classes))
    clients = PARTITIONS["pathological"].build(Samples(labels), num_clients, rng, classes_per_client=per_client)
    counts = class_counts(labels, clients, num_classes)

    assert ((counts > 0).sum(axis=1) == per_client).all()
    num_holders = (counts > 0).sum(axis=0)
    assert num_holders.max() - num_holders.min() <= 1
    for column, size in zip(counts.T, sizes_of_classes, strict=True):
        parts = column[column > 0]
        assert not len(parts) or (parts.sum() == size and parts.max() - parts.min() <= 1)
    assert num_holders.all() == (num_clients * per_client >= num_classes)


def test_pathological_of_one_client_with_every_class_is_everything() -> None:
    (client,) = PARTITIONS["pathological"].build(
        Samples(np.arange(30) % 3), 1, np.random.default_rng(0), classes_per_client=3
    )
    assert client.tolist() == list(range(30))


def test_pathological_leaves_out_classes_without_a_holder() -> None:
    labels = np.repeat(np.arange(10), 6)
    clients = PARTITIONS["pathological"].build(Samples(labels), 3, np.random.default_rng(0))
    assert [len(indices) for indices in clients] == [12, 12, 12]


@pytest.mark.parametrize(
    ("labels", "num_clients", "per_client", "message"),
    [
        (np.arange(30) % 3, 4, 4, r"data\.partition\.classes_per_client: 4 given; allowed is 1 to 3"),
        (np.repeat([0, 5], 10), 4, 3, r"data\.partition\.classes_per_client: 3 given; allowed is 1 to 2"),
        (
            np.repeat([0, 7], [40, 3]),
            4,
            2,
            r"data\.partition: .* 4 clients and 2 .* gives class 7 to 4 clients, but it has 3 samples; lower data",
        ),
    ],
)
def test_pathological_out_of_reach(labels: np.ndarray, num_clients: int, per_client: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PARTITIONS["pathological"].build(
            Samples(labels), num_clients, np.random.default_rng(0), classes_per_client=per_client
        )


# --- quantity_skew


def test_apportioned() -> None:
    assert apportioned(np.array([0.5, 0.3, 0.2]), 9).tolist() == [4, 3, 2]  # 4.5, 2.7, 1.8: the rest to .8, .7
    assert apportioned(np.full(3, 1 / 3), 10).tolist() == [4, 3, 3]
    assert apportioned(np.array([1.0]), 0).tolist() == [0]


def test_sizes_are_log_normal() -> None:
    clients = PARTITIONS["quantity_skew"].build(
        Samples(np.zeros(10**6, np.int64)), 2000, np.random.default_rng(0), sigma=0.5, min_size=0
    )
    logs = np.log([len(indices) for indices in clients])
    assert logs.std() == pytest.approx(0.5, abs=0.03)
    # The mean size is exp(sigma^2 / 2) times the median.
    assert logs.mean() == pytest.approx(np.log(500) - 0.125, abs=0.05)
    assert abs(np.mean(((logs - logs.mean()) / logs.std()) ** 3)) < 0.2


def test_quantity_skew_keeps_the_mixture_of_classes() -> None:
    labels = np.repeat(np.arange(4), 10_000)
    clients = PARTITIONS["quantity_skew"].build(Samples(labels), 10, np.random.default_rng(0))
    sizes = np.array([[len(indices)] for indices in clients])
    assert sizes.max() > 3 * sizes.min()
    shares = class_counts(labels, clients, 4) / sizes
    assert (np.abs(shares - 0.25) < 4 * np.sqrt(0.25 * 0.75 / sizes)).all()


@pytest.mark.parametrize(("sigma", "min_size", "expected"), [(0.0, 1, {8, 9}), (1e300, 1, {1, 91}), (1.0, 8, None)])
def test_quantity_skew_at_the_ends(sigma: float, min_size: int, expected: set[int] | None) -> None:
    clients = PARTITIONS["quantity_skew"].build(
        Samples(np.zeros(100, np.int64)),
        12 if sigma == 0 else 10,
        np.random.default_rng(0),
        sigma=sigma,
        min_size=min_size,
    )
    sizes = {len(indices) for indices in clients}
    assert sizes == expected if expected else min(sizes) >= min_size


# --- dirichlet_uncapped


def test_uncapped_sizes_spread_more_and_clients_may_be_empty() -> None:
    labels = np.repeat(np.arange(10), 500)

    def sizes(kind: str, **parameters: object) -> list[int]:
        clients = PARTITIONS[kind].build(Samples(labels), 50, np.random.default_rng(0), alpha=0.05, **parameters)
        return [len(indices) for indices in clients]

    uncapped = sizes("dirichlet_uncapped")
    assert min(uncapped) == 0
    assert np.std(uncapped) > np.std(sizes("dirichlet", min_size=0))


def test_uncapped_draws_again_for_a_minimum() -> None:
    labels = np.repeat(np.arange(10), 500)
    free, bound = (
        PARTITIONS["dirichlet_uncapped"].build(
            Samples(labels), 10, np.random.default_rng(0), alpha=0.1, min_size=min_size
        )
        for min_size in (0, 100)
    )
    assert min(map(len, free)) < 100 <= min(map(len, bound))


def test_uncapped_says_what_to_change_when_draws_run_out() -> None:
    labels = np.repeat(np.arange(10), 500)
    with pytest.raises(ValueError, match=r"dirichlet_uncapped with alpha=0.01 gave none of 3 draws .* min_size=400"):
        PARTITIONS["dirichlet_uncapped"].build(
            Samples(labels), 10, np.random.default_rng(0), alpha=0.01, min_size=400, max_tries=3
        )


# --- natural


def test_natural_gives_a_client_the_samples_of_its_id() -> None:
    ids = np.array([3, 1, 3, 0, 1, 3])
    clients = partitions.natural(Samples(np.zeros(6, np.int64), ids), 3, np.random.default_rng(0))
    assert [indices.tolist() for indices in clients] == [[3], [1, 4], [0, 2, 5]]


def test_natural_takes_a_random_subset_in_ascending_order() -> None:
    ids = np.random.default_rng(0).permutation(np.arange(200) % 20)
    chosen = set()
    for seed in range(30):
        clients = partitions.natural(Samples(np.zeros(200, np.int64), ids), 4, np.random.default_rng(seed))
        assert [len(indices) for indices in clients] == [10] * 4
        of_client = [np.unique(ids[indices]).tolist() for indices in clients]
        assert all(len(numbers) == 1 for numbers in of_client)
        assert of_client == sorted(of_client)
        chosen |= {number for (number,) in of_client}
    assert len(chosen) == 20


@pytest.mark.parametrize("num_clients", [0, 4])
def test_natural_with_more_clients_than_ids(num_clients: int) -> None:
    samples = Samples(np.zeros(6, np.int64), np.arange(6) % 3)
    message = rf"data\.partition\.clients: {num_clients} given; allowed is 1 to 3"
    with pytest.raises(ValueError, match=message):
        partitions.natural(samples, num_clients, np.random.default_rng(0))


def test_natural_without_ids_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"data\.partition\.type: natural .* data\.client .* train_clients"):
        partitions.natural(Samples(np.zeros(6, np.int64)), 2, np.random.default_rng(0))


# --- dirichlet_balanced


def test_balanced_expected_share_follows_prior_times_what_is_left() -> None:
    labels = np.repeat([0, 1], [300, 100])
    prior = np.array([0.5, 0.5])
    rng = np.random.default_rng(0)
    candidates = np.arange(400)
    drawn = [by_dirichlet._draw_weighted(candidates, prior, labels, 4, rng) for _ in range(2000)]
    assert np.mean(labels[np.concatenate(drawn)]) == pytest.approx(0.25, abs=0.02)


def test_balanced_tops_up_from_the_unassigned() -> None:
    labels = np.array([0, 0, 1, 1, 1, 1])
    chosen = by_dirichlet._draw_weighted(np.arange(6), np.array([1.0, 0.0]), labels, 4, np.random.default_rng(0))
    assert {0, 1} < set(chosen.tolist())
    assert len(set(chosen.tolist())) == 4
    # No weight at all, as for a client whose only class is used up.
    chosen = by_dirichlet._draw_weighted(np.arange(2, 6), np.array([1.0, 0.0]), labels, 3, np.random.default_rng(0))
    assert len(set(chosen.tolist()) & {2, 3, 4, 5}) == 3


def test_a_sample_given_twice_is_noticed() -> None:
    with pytest.raises(AssertionError, match="two clients"):
        checked([np.array([0, 1]), np.array([1])], 2)
    with pytest.raises(AssertionError, match="no client"):
        checked([np.array([0])], 2)


@pytest.mark.parametrize(("alpha", "num_clients", "num_classes"), [(0.1, 1500, 10), (100.0, 300, 3), (0.01, 900, 40)])
def test_dirichlet_balanced_draws_what_numpys_choice_draws(alpha: float, num_clients: int, num_classes: int) -> None:
    labels = np.random.default_rng(1).integers(num_classes, size=9001)
    found = PARTITIONS["dirichlet_balanced"].build(Samples(labels), num_clients, np.random.default_rng(3), alpha=alpha)
    rng, size = np.random.default_rng(3), len(labels) // num_clients
    left = np.ones(len(labels), bool)
    for client in found:
        prior = rng.dirichlet(np.full(num_classes, alpha))
        candidates = np.flatnonzero(left)
        weights = prior[labels[candidates]]
        possible = np.flatnonzero(weights / weights.sum() > 0)
        if len(possible) <= size:
            break  # what then happens is not asked here
        share = weights[possible] / weights[possible].sum()
        expected = candidates[rng.choice(possible, size, replace=False, p=share)]
        assert np.array_equal(client, np.sort(expected))
        left[expected] = False
    assert left.sum() < 0.6 * len(labels), "many draws were compared"


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("num_bins", [2, 7, 60])
def test_bins_of_real_targets_are_even_and_in_order(num_bins: int, width: int | None) -> None:
    targets = np.random.default_rng(0).normal(size=(60, *([width] if width else []))).astype(np.float32)
    bins_of = target_bins(targets, num_bins)
    first, bins = targets.reshape(60, -1)[:, 0], bins_of(targets)
    assert bins.dtype == np.int64
    sizes = np.bincount(bins, minlength=num_bins)
    assert len(sizes) == num_bins
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(bins[np.argsort(first)]) >= 0).all()
    # Others, such as test samples, fall where training samples of their value do, and beyond both ends.
    assert np.array_equal(bins_of(targets[10:20]), bins[10:20])
    assert bins_of(np.array([-1e9, 1e9])).tolist() == [0, num_bins - 1]


@pytest.mark.parametrize("values", [[3.0] * 8, [0.0] * 7 + [1.0], [0.0, 1.0] * 4])
def test_more_bins_than_the_targets_fill_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^data\.bins: got 3, but the training targets have [12] different values"):
        target_bins(np.array(values), 3)
