"""Weighted means: of the updates as they are (FedAvg), per step (FedNova), per parameter (Fisher diagonals)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers


class FedAvg(AnyLayers):
    """The weighted mean of the updates, `sum_k w_k u_k`.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, algorithm 1.
    """

    def direction(self, cohort: Cohort) -> Direction:
        return Direction(cohort.updates.combine(cohort.weights))


class FedNova(AnyLayers):
    """Updates normalised by how far their local steps could have carried them.

    The mean of the updates per effective step `a_k`, times the mean number of steps.

        tau sum_k w_k u_k / a_k        tau = sum_k w_k a_k, or sum_k w_k K_k under a proximal term

    `a_k` is what the local method says of its `K_k` steps: `K_k` for plain SGD, more with momentum, less with a
    proximal term. Clients without an effective step are dropped, and the weights of the others made to sum to 1. Equal
    `a_k`, or one client: FedAvg up to rounding, but for the proximal term, where the update becomes `K / a` times as
    long. Decay of the rate within a round is not covered, and weight decay counts as part of the gradient, as in the
    released program.

    The program's server momentum, `v <- gmf v + d / lr` and `theta + lr v` with the local rate of the round, is
    `server.optimizer: {type: momentum, beta: gmf}` where `local.lr_decay` is 1. With a decay it is not: there what `v`
    has gathered shrinks with the rate, which `momentum` does not know.

    Diagnostics: `fednova/effective_steps`, that is `tau`.

    J. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
    2020, and its released program.
    """

    def direction(self, cohort: Cohort) -> Direction:
        clients = cohort.clients
        counted = clients.num_steps.to(torch.float64) if clients.proximal else clients.effective_steps
        coefficients, tau = normalised(cohort.weights, clients.effective_steps, counted)
        return Direction(cohort.updates.combine(coefficients), {"fednova/effective_steps": tau})


def normalised(weights: Tensor, a: Tensor, counted: Tensor) -> tuple[Tensor, float]:
    """The coefficients `tau w_k / a_k`, `[K]`, and `tau = sum_k w_k counted_k`; all 0 where no client made a step."""
    kept = weights * (a > 0)
    if not kept.any():
        return torch.zeros_like(weights), 0.0
    kept = kept / kept.sum()
    tau = (kept * counted).sum()
    return tau * kept / torch.where(a > 0, a, 1.0), float(tau)


_SMALLEST = 1e-6


class FisherDiagonal(AnyLayers):
    """For every parameter, the mean of the updates weighted by how sure each client is of it:

        sum_k w_k F_k u_k / sum_k w_k F_k

    with `F_k` the diagonal of client k's Fisher matrix (labels drawn from the model, not those of the data) at the
    model it trained, on its data. Where the denominator is below 1e-6, the weighted mean of the updates. In terms of
    the models `y_k` this is `sum_k w_k F_k y_k / sum_k w_k F_k`. Equal `F_k` give FedAvg up to rounding; one client
    gives its model.

    This minimises `sum_k w_k (y - y_k)^T diag(F_k) (y - y_k)` at once. FedFisher goes down the same objective from the
    FedAvg model in 2000 steps of rate 0.01 with momentum and a scaling per parameter (`v = F y - sum_k F_k y_k; m <- v
    + 0.9 m; s <- v^2 + 0.99 s; y <- y - 0.01 m / (sqrt(s) + 0.01)`), keeps the best model on 500 validation samples,
    and rounds what clients send to 15 bits: where the Fisher is small it stays near FedAvg, which the fall-back here
    does at once and only below its threshold.

    Diagnostics: `fisher_diagonal/norm`, the mean Euclidean norm of the `F_k`.

    M. Matena, C. Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022 (equation from memory), as the
    released program of D. Jhunjhunwala et al., "FedFisher: Leveraging Fisher Information for One-Shot Federated
    Learning", AISTATS 2024, has it.
    """

    def direction(self, cohort: Cohort) -> Direction:
        diagonals = cohort.rows("fisher_diagonal")
        merged = cohort.updates.columnwise(lambda u, fisher: fisher_mean(u, fisher, cohort.weights), diagonals)
        return Direction(merged, {"fisher_diagonal/norm": float(diagonals.norms().mean())})


def fisher_mean(updates: Tensor, fisher: Tensor, weights: Tensor) -> Tensor:
    """`[n]` from `updates` and `fisher`, `[K, n]`, and `weights [K]`: the formula at `FisherDiagonal`."""
    column = weights.to(updates).unsqueeze(1)
    denominator = (column * fisher).sum(0)
    mean = (column * updates).sum(0)
    known = denominator >= _SMALLEST
    return torch.where(known, (column * fisher * updates).sum(0) / torch.where(known, denominator, 1.0), mean)
