"""Who takes part and what they do are functions of (seed, round, client), and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspec_dist.clients.executors.sequential import ClientWork
from fedspec_dist.config import Config, Local, Phase, load
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.rounds.phases import phase_of_round
from fedspec_dist.rounds.sampling import client_work, reporting, sample_cohort, workload

POPULATION = [0, 2, 3, 7, 8, 11, 20, 21]
SAMPLES = np.array([3, 5, 8, 13, 21, 34, 55])


COUNTS = np.array([4, 3])


def _config(**settings: object) -> Config:
    return load(None, ["data.partition.clients=22", *(f"{key}={value}" for key, value in settings.items())])


def _cohort(seed: int, index: int, size: int) -> list[int]:
    return sample_cohort(_config(seed=seed, clients_per_round=size), index, POPULATION)


def _local(**settings: object) -> Local:
    return load(None, [f"local.{key}={value}" for key, value in settings.items()]).local


def _work(seed: int = 0, index: int = 0, client: int = 4, augmentation: Augmentation | None = None) -> ClientWork:
    augmentation = augmentation or Augmentation(padding=2, flip=True)
    load = workload(seed, _local(epochs=3, batch_size=4), index, client, len(SAMPLES))
    return client_work(seed, index, client, SAMPLES, COUNTS, load, augmentation, torch.device("cpu"))


def test_a_cohort_is_sorted_unique_and_from_the_population() -> None:
    for index in range(50):
        cohort = _cohort(0, index, 5)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 5
        assert set(cohort) <= set(POPULATION)


def test_a_cohort_is_a_function_of_seed_and_round() -> None:
    for index in reversed(range(20)):
        np.random.seed(index)  # the global generator must not matter
        assert _cohort(3, index, 4) == _cohort(3, index, 4)
    assert len({tuple(_cohort(3, index, 4)) for index in range(30)}) > 10
    assert len({tuple(_cohort(seed, 0, 4)) for seed in range(30)}) > 10


def test_every_client_takes_part_about_as_often() -> None:
    counts = dict.fromkeys(POPULATION, 0)
    config = _config(seed=1, clients_per_round=3)
    for index in range(800):
        for client in sample_cohort(config, index, POPULATION):
            counts[client] += 1
    assert all(240 < count < 360 for count in counts.values()), counts


def test_the_whole_population_may_take_part_but_no_more() -> None:
    assert _cohort(0, 0, 8) == POPULATION
    with pytest.raises(ValueError, match=r"clients_per_round: got 9, but only 8 clients have data; allowed: at most 8"):
        _cohort(0, 0, 9)


@pytest.mark.parametrize("per_round", [2, 2 / 22])
def test_bernoulli_takes_each_client_by_itself(per_round: float) -> None:
    config = _config(clients_per_round=per_round, sampling="bernoulli")
    cohorts = [sample_cohort(config, index, POPULATION) for index in range(2000)]
    # Of 8 clients with probability 1/4 each, given that anybody comes.
    assert np.mean([len(cohort) for cohort in cohorts]) == pytest.approx(2 / (1 - 0.75**8), rel=0.05)
    assert {len(cohort) for cohort in cohorts} >= {1, 2, 3, 4, 5}
    assert all(cohort == sorted(set(cohort)) and cohort for cohort in cohorts)
    taking_part = [sum(client in cohort for cohort in cohorts) for client in POPULATION]
    assert max(taking_part) / min(taking_part) < 1.25


def test_bernoulli_never_leaves_a_round_empty() -> None:
    for share in (0.01, 1e-9):  # the second ends, too, with one client
        config = _config(clients_per_round=share, sampling="bernoulli")
        cohorts = [sample_cohort(config, index, POPULATION) for index in range(30)]
        assert all(cohorts)
        assert len({tuple(cohort) for cohort in cohorts}) > 3


def test_bernoulli_has_the_cohort_asked_for_on_average_where_clients_have_no_data() -> None:
    # 22 clients, 8 of them with data.
    config = _config(clients_per_round=6, sampling="bernoulli")
    assert np.mean([len(sample_cohort(config, index, POPULATION)) for index in range(500)]) == pytest.approx(6, rel=0.1)
    config = _config(clients_per_round=20, sampling="bernoulli")
    assert sample_cohort(config, 0, POPULATION) == POPULATION


def test_dropping_out_is_a_function_of_seed_round_and_client() -> None:
    config = _config(dropout=0.3)
    rounds = [reporting(config, index, POPULATION) for index in range(1000)]
    assert rounds == [reporting(config, index, POPULATION) for index in range(1000)]
    assert np.mean([len(cohort) for cohort in rounds]) == pytest.approx(0.7 * 8, rel=0.05)
    # Whether client 7 reports does not depend on who else was asked.
    assert [7 in cohort for cohort in rounds] == [reporting(config, index, [7]) == [7] for index in range(1000)]
    assert reporting(_config(), 0, POPULATION) == POPULATION


def test_uneven_work_is_drawn_for_each_client_and_round() -> None:
    local = _local(epochs="{min: 2, max: 4}", batch_size=4)
    loads = [workload(0, local, index, client, 7) for index in range(40) for client in range(5)]
    assert {load.epochs for load in loads} == {2, 3, 4}
    assert all(load.num_steps == 2 * load.epochs == len(load.bounds) for load in loads)
    assert workload(0, local, 3, 2, 7) == workload(0, local, 3, 2, 700 // 100)
    counts = np.bincount([load.epochs for load in loads])[2:]
    assert counts.min() > 45


@pytest.mark.parametrize(("steps", "seen"), [(1, 4), (2, 7), (3, 11), (5, 18)])
def test_steps_take_the_place_of_epochs(steps: int, seen: int) -> None:
    load = workload(0, _local(steps=steps, batch_size=4), 0, 4, 7)
    assert (load.num_steps, load.samples_seen) == (steps, seen)
    work = client_work(0, 0, 4, SAMPLES, COUNTS, load, Augmentation(padding=2, flip=True), torch.device("cpu"))
    assert len(work.order) == seen
    assert work.draws is not None
    assert len(work.draws) == seen
    # The batches are those that whole epochs begin with.
    assert torch.equal(work.order, _work().order[:seen])


def test_a_clients_own_facts_go_with_its_work() -> None:
    work = _work(index=6)
    assert work.samples.tolist() == SAMPLES.tolist()
    assert work.class_counts.tolist() == COUNTS.tolist()
    assert work.client == 4
    assert len({_work(*key).filter_seed for key in [(0, 6, 4), (1, 6, 4), (0, 7, 4), (0, 6, 5)]}) == 4


def test_work_covers_the_clients_samples_once_an_epoch() -> None:
    work = _work()
    assert work.bounds == [(0, 4), (4, 7), (7, 11), (11, 14), (14, 18), (18, 21)]
    epochs = work.order.reshape(3, 7)
    assert all(sorted(epoch.tolist()) == SAMPLES.tolist() for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_work_is_a_function_of_seed_round_and_client() -> None:
    same, again = _work(), _work()
    assert torch.equal(same.order, again.order)
    assert same.draws is not None
    assert again.draws is not None
    assert torch.equal(same.draws, again.draws)
    for other in (_work(seed=1), _work(index=1), _work(client=5)):
        assert not torch.equal(same.order, other.order)
        assert other.draws is not None
        assert not torch.equal(same.draws, other.draws)


def test_augmentation_does_not_change_the_batches() -> None:
    assert torch.equal(_work().order, _work(augmentation=Augmentation()).order)


def test_a_client_without_samples_has_no_batches() -> None:
    load = workload(0, _local(), 0, 1, 0)
    work = client_work(0, 0, 1, SAMPLES[:0], COUNTS, load, Augmentation(), torch.device("cpu"))
    assert list(work.bounds) == []
    assert work.order.shape == (0,)


def test_the_phase_of_each_round() -> None:
    phases = [Phase.model_construct(rounds=count) for count in (2, 1, 3)]
    assert [phase_of_round(phases, index) for index in range(6)] == [0, 0, 1, 2, 2, 2]
