"""Who takes part and what they do are functions of (seed, round, client), and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspec_dist.clients.sequential import ClientWork
from fedspec_dist.config import Phase
from fedspec_dist.data.augment import Augmentation
from fedspec_dist.rounds.phases import phase_of_round
from fedspec_dist.rounds.sampling import client_work, sample_cohort

POPULATION = [0, 2, 3, 7, 8, 11, 20, 21]
SAMPLES = np.array([3, 5, 8, 13, 21, 34, 55])


def _work(seed: int = 0, index: int = 0, client: int = 4, augmentation: Augmentation | None = None) -> ClientWork:
    augmentation = augmentation or Augmentation(padding=2, flip=True)
    return client_work(seed, index, client, SAMPLES, 3, 4, augmentation, torch.device("cpu"))


def test_a_cohort_is_sorted_unique_and_from_the_population() -> None:
    for index in range(50):
        cohort = sample_cohort(0, index, POPULATION, 5)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 5
        assert set(cohort) <= set(POPULATION)


def test_a_cohort_is_a_function_of_seed_and_round() -> None:
    for index in reversed(range(20)):
        np.random.seed(index)  # the global generator must not matter
        assert sample_cohort(3, index, POPULATION, 4) == sample_cohort(3, index, POPULATION, 4)
    assert len({tuple(sample_cohort(3, index, POPULATION, 4)) for index in range(30)}) > 10
    assert len({tuple(sample_cohort(seed, 0, POPULATION, 4)) for seed in range(30)}) > 10


def test_every_client_takes_part_about_as_often() -> None:
    counts = dict.fromkeys(POPULATION, 0)
    for index in range(800):
        for client in sample_cohort(1, index, POPULATION, 3):
            counts[client] += 1
    assert all(240 < count < 360 for count in counts.values()), counts


def test_the_whole_population_may_take_part_but_no_more() -> None:
    assert sample_cohort(0, 0, POPULATION, 8) == POPULATION
    with pytest.raises(ValueError, match=r"clients_per_round: got 9, but only 8 clients have data; allowed: at most 8"):
        sample_cohort(0, 0, POPULATION, 9)


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
    work = client_work(0, 0, 1, SAMPLES[:0], 2, 4, Augmentation(), torch.device("cpu"))
    assert list(work.bounds) == []
    assert work.order.shape == (0,)


def test_the_phase_of_each_round() -> None:
    phases = [Phase.model_construct(rounds=count) for count in (2, 1, 3)]
    assert [phase_of_round(phases, index) for index in range(6)] == [0, 0, 1, 2, 2, 2]
