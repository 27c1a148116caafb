"""The account of the privacy spent, where its package is installed: `pip install -e '.[privacy]'`."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log

import pytest
import torch

pytest.importorskip("dp_accounting")

from fedspec_dist.server.transforms.privacy import _ORDERS, Noise, epsilon
from tests.reference import dense_cohort


def gaussian_epsilon(multiplier: float, num_rounds: int, delta: float) -> float:
    """Of the Gaussian mechanism of sensitivity 2, by Renyi divergences `a (2 / multiplier)^2 / 2` and the conversion of
    Canonne, Kamath and Steinke (2020), written down once more."""
    best = inf
    for order in _ORDERS:
        divergence = num_rounds * order * (2 / multiplier) ** 2 / 2
        best = min(best, divergence + log((order - 1) / order) - (log(delta) + log(order)) / (order - 1))
    return best


@pytest.mark.parametrize(("multiplier", "num_rounds"), [(4.0, 1), (8.0, 10), (20.0, 3)])
def test_rounds_with_all_clients_are_gaussian_mechanisms(multiplier: float, num_rounds: int) -> None:
    rounds = [0] * 10 + [num_rounds]
    assert epsilon(multiplier, rounds, 10, 1e-5) == pytest.approx(gaussian_epsilon(multiplier, num_rounds, 1e-5))


def test_sampling_few_of_many_spends_less_and_every_round_more() -> None:
    few = [epsilon(4.0, [0, 0, count], 50, 1e-5) for count in (1, 2, 5)]
    assert 0 < few[0] < few[1] < few[2] < epsilon(4.0, [0, 5], 1, 1e-5)


def test_noise_counts_its_rounds_in_what_is_kept() -> None:
    noise = Noise(4.0, delta=1e-5)
    cohort = replace(dense_cohort(torch.ones(2, 3), population=50), clip_norm=1.0)
    state = noise.initial_state(50)
    spent = [noise.apply(cohort, state).diagnostics["noise/epsilon"] for _ in range(3)]
    assert spent == [epsilon(4.0, [0, 0, count], 50, 1e-5) for count in (1, 2, 3)]
    assert state["rounds"].tolist() == [0, 0, 3] + [0] * 48
    resumed = {"rounds": state["rounds"].clone()}
    assert Noise(4.0, delta=1e-5).apply(cohort, resumed).diagnostics == noise.apply(cohort, state).diagnostics
