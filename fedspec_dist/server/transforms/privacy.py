"""Clip and noise, as DP-FedAvg has them, and the privacy that they spend by the package dp-accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from fedspec_dist.core import seeding
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.protocols import Transformed
from fedspec_dist.server.transforms.mixed import Term, as_mixed, mix


class Clip:
    """Updates shortened to at most a given norm.

    `u_k <- u_k min(1, norm / ||u_k||)`, the whole update as one vector. Where none is longer, all stay bit for bit.

    Diagnostics: `clip/share`, of the clients that were longer; `clip/norm_median`, before.

    H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
    2018, flat clipping.
    """

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def initial_state(self, population: int) -> dict[str, Tensor]:
        return {}

    def apply(self, cohort: Cohort, state: dict[str, Tensor]) -> Transformed:
        norms = cohort.updates.norms()
        scale = torch.where(norms > self.norm, self.norm / norms, 1.0)
        diagnostics = {"clip/share": float((scale < 1).double().mean()), "clip/norm_median": float(norms.median())}
        return Transformed(replace(mix(cohort, scale), clip_norm=self.norm), diagnostics)


class Noise:
    """One Gaussian vector added to what is aggregated, as DP-FedAvg adds it.

    `u_k <- u_k + z` with one `z ~ N(0, std^2 I)` for all clients of a round,

        std = multiplier * clip norm * max_k w_k

    so that a mean with weights w, whose sum is 1, moves by `z`; so does every aggregator that moves with its points
    (median, trimmed mean, Krum, geometric median). `clip norm * max_k w_k` is the most that one client adds to the
    mean; with uniform weights `std = multiplier * clip norm / K`. `multiplier = 0` leaves all as they are, bit for bit.

    With `delta`, the metric `noise/epsilon` is what the models of all rounds so far have spent, by `epsilon`.
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


# Of the Renyi divergences. More of them take a tenth of a second a round, and change the third digit at most.
_ORDERS = (*range(2, 33), 48, 64, 128)


def require_accountant() -> None:
    """Raises ValueError where the accountant is not installed."""
    if find_spec("dp_accounting") is None:
        raise ValueError(
            "server.transforms.delta: got one, but the package that accounts for privacy is not installed: pip install "
            "dp-accounting; or leave delta out, for noise without an account"
        )


def epsilon(multiplier: float, rounds: Sequence[int], population: int, delta: float) -> float:
    """The epsilon, at `delta`, of the models of all rounds, `rounds[k]` of which had k clients.

    Of `population` clients, k are drawn without replacement, their updates clipped and summed, and noise of standard
    deviation `multiplier * clip norm` added. Neighbours differ in the data of one client, whose update then moves the
    sum by at most twice the clip norm; who is drawn, and how many, does not depend on the data. Renyi differential
    privacy of sampling without replacement: Y.-X. Wang, B. Balle, S. Kasiviswanathan, "Subsampled Renyi Differential
    Privacy and Analytical Moments Accountant", AISTATS 2019.
    """
    import dp_accounting  # type: ignore[import-not-found, unused-ignore]
    from dp_accounting.rdp import RdpAccountant  # type: ignore[import-not-found, unused-ignore]

    accountant = RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    round_of_all = dp_accounting.GaussianDpEvent(multiplier / 2)
    for num_clients, count in enumerate(rounds):
        if num_clients and count:
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, num_clients, round_of_all)
            accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))
