"""FedDisco: weights from sample counts and class imbalance."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.protocols import Weights
from fedspec_dist.server.weights.shares import Stateless


class FedDisco(Stateless):
    """Clients count less the further their class distribution lies from the target, uniform or that of the test set:

        w_k = t_k / sum_j t_j        t_k = max(n_k / sum_j n_j - a d_k + b, 0)

    with the discrepancies `d_k` of `discrepancies`. `a = b = 0` is `samples`, bit for bit; one client has weight 1.
    With `b > 0` alone the weights are *not* the shares. Where no `t_k` is positive, which the released program leaves
    undefined, the shares are used. A client without samples has weight 0.

    `target = "test"` is for a test set that is not balanced, and takes its share of each class, over the samples that
    are tested on. On a balanced one it is `uniform`.

    Diagnostics: `feddisco/dropped`, the share of clients with weight 0.

    R. Ye et al., "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", ICML 2023, and its released
    program.

    Raises:
        ValueError: in `weigh`, a client has samples of a class that the test set lacks, from which its KL divergence is
            infinite.
    """

    def __init__(self, a: float, b: float, metric: str, target: str) -> None:
        self.a, self.b, self.metric, self.target = a, b, metric, target

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        clients = cohort.clients
        d = discrepancies(clients.class_counts, self.metric, self._target_counts(cohort))
        values = weights(clients.shares, d, self.a, self.b)
        dropped = float((values == 0).double().mean())
        return Weights(values, diagnostics={"feddisco/dropped": dropped})

    def _target_counts(self, cohort: Cohort) -> Tensor:
        counts = cohort.clients.class_counts
        if self.target == "uniform":
            return torch.ones_like(counts[0])
        assert cohort.test_class_counts is not None, "feddisco needs the classes of the test set; the round has none"
        if self.metric == "kl" and bool((counts.sum(0) > 0)[cohort.test_class_counts == 0].any()):
            raise ValueError(
                "server.weights.target: got 'test' with metric 'kl', but clients have samples of classes that the test "
                "set has none of; allowed with it: another metric, or target: uniform"
            )
        return cohort.test_class_counts


def weights(shares: Tensor, d: Tensor, a: float, b: float) -> Tensor:
    """`w [K]` from the shares of the samples `[K]` and the discrepancies `[K]`: the formula at `FedDisco`."""
    if a == b == 0:
        return shares
    penalty = a * d if a else torch.zeros_like(d)
    t = (shares - penalty + b).clamp(min=0) * (shares > 0)
    return t / t.sum() if t.any() else shares


def discrepancies(class_counts: Tensor, metric: str, target_counts: Tensor) -> Tensor:
    """`d [K]`, float64, between each row `P` of `class_counts [K, C]` and `q`, from `target_counts [C]`; both sum to 1.

    `kl`: `sum_c P log(P / q)`, divided by its sum over the clients (as the released program does for this metric only);
    `l2` and `l1`: the norm of `P - q`; `cosine`: `1 - cos(P, q)`; `only_iid`: 0.01 where the cosine is above 0.9, else
    infinite.
    """
    counts, target = class_counts.to(torch.float64), target_counts.to(torch.float64)
    p = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return METRICS[metric](p, (target / target.sum()).repeat(len(p), 1))


def divergences(p: Tensor, q: Tensor) -> Tensor:
    """`sum_c P log(P / q)`, `[K]`, of the rows of `p [K, C]` and `q [K, C]`; a class without P adds nothing."""
    return torch.xlogy(p, torch.where(p > 0, p / q, 1.0)).sum(1).clamp(min=0)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    divergence = divergences(p, q)
    total = divergence.sum()
    return divergence / total if total > 0 else divergence


def _cosine(p: Tensor, q: Tensor) -> Tensor:
    return torch.cosine_similarity(p, q, dim=1)


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _kl,
    "l2": lambda p, q: (p - q).norm(dim=1),
    "l1": lambda p, q: (p - q).abs().sum(1),
    "cosine": lambda p, q: 1 - _cosine(p, q),
    "only_iid": lambda p, q: torch.full_like(p[:, 0], inf).masked_fill(_cosine(p, q) > 0.9, 0.01),
}
