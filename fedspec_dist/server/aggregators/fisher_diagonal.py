"""Merging of models by the diagonals of their Fisher matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers

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
