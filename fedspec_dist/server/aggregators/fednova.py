"""FedNova: updates normalised by how far their local steps could have carried them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers


class FedNova(AnyLayers):
    """The mean of the updates per effective step `a_k`, times the mean number of steps.

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
