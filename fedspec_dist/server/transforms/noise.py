"""Noise: one Gaussian vector added to what is aggregated, as DP-FedAvg adds it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedspec_dist.core import seeding
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.protocols import Transformed
from fedspec_dist.server.transforms.mixed import Term, as_mixed
from fedspec_dist.server.transforms.privacy import epsilon, require_accountant


class Noise:
    """`u_k <- u_k + z` with one `z ~ N(0, std^2 I)` for all clients of a round,

        std = multiplier * clip norm * max_k w_k

    so that a mean with weights w, whose sum is 1, moves by `z`; so does every aggregator that moves with its points
    (median, trimmed mean, Krum, geometric median). `clip norm * max_k w_k` is the most that one client adds to the
    mean; with uniform weights `std = multiplier * clip norm / K`. `multiplier = 0` leaves all as they are, bit for bit.

    With `delta`, the metric `noise/epsilon` is what the models of all rounds so far have spent, by `privacy.epsilon`.
    It covers the models alone, not the other metrics of a run.

    Diagnostics: `noise/std`, and `noise/epsilon` with `delta`.

    H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
    2018, algorithm 1.

    Raises:
        ValueError: the accountant that `delta` asks for is not installed.
    """

    def __init__(self, multiplier: float, delta: float | None) -> None:
        if delta is not None:
            require_accountant()
        self.multiplier, self.delta = multiplier, delta

    def initial_state(self, population: int) -> dict[str, Tensor]:
        """`rounds [N + 1]` int64: how many rounds had k clients. With `delta` only."""
        return {} if self.delta is None else {"rounds": torch.zeros(population + 1, dtype=torch.int64)}

    def apply(self, cohort: Cohort, state: dict[str, Tensor]) -> Transformed:
        assert cohort.clip_norm is not None, "noise needs to know to what the updates are clipped"
        std = self.multiplier * cohort.clip_norm * float(cohort.weights.max())
        diagnostics = {"noise/std": std}
        if self.delta is not None:
            state["rounds"][cohort.updates.num_rows] += 1
            spent = state["rounds"].tolist()
            diagnostics["noise/epsilon"] = epsilon(self.multiplier, spent, cohort.clients.population, self.delta)
        if std:
            noise = cohort.slicing.rows(std * _normal(cohort).unsqueeze(0).to(cohort.theta.device))
            everybody = torch.ones(cohort.updates.num_rows, 1, dtype=torch.float64)
            cohort = replace(cohort, updates=as_mixed(cohort).plus(Term(everybody, noise)))
        return Transformed(cohort, diagnostics)


def _normal(cohort: Cohort) -> Tensor:
    """This rank's slice of a standard normal vector `[P]`, keyed by seed, round and block; drawn on the CPU."""

    def block(number: int, width: int) -> Tensor:
        key = (cohort.seed, "server noise", cohort.round_index, number)
        generator = torch.Generator().manual_seed(seeding.torch_seed(*key))
        return torch.randn(width, generator=generator, dtype=torch.float64)

    return cohort.slicing.draw(block)
