"""FedLC: logits calibrated by how often a client saw each class.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu, "Federated Learning with Label Distribution Skew via Logits
Calibration", ICML 2022, equation 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm


class FedLC(LocalAlgorithm):
    """The task's loss on calibrated logits `z'_c = z_c - tau n_c^(-1/4)`, `n_c` the client's samples of class c.

    Classes that the client does not have are left out exactly, `z'_c = -inf`, and get no gradient. Evaluation uses the
    logits as they are. With `denominator = "others"` the loss is the paper's literal `cross_entropy_among_others`,
    which is reported to collapse; FL-bench and FedDecorr use the ordinary softmax. Default tau: FL-bench.

    `tau = 0` is FedAvg bit for bit (with the denominator `all`); equal counts for all classes shift all logits alike.
    A client with one class has loss and gradient exactly 0, in both forms.
    """

    def __init__(self, tau: float, denominator: str) -> None:
        self.tau = tau
        self.denominator = denominator

    def loss(self, model: Any, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        calibrated = calibrate(model(inputs), client.class_counts, self.tau)
        if self.denominator == "others":
            return cross_entropy_among_others(calibrated, labels)
        return client.task_loss(calibrated, labels)


def calibrate(
    logits: Tensor,  # [B, C]
    class_counts: Tensor,  # [C], how many samples of each class the client has
    tau: float,
) -> Tensor:  # [B, C]
    """`z_c - tau n_c^(-1/4)`, which is -inf for a class without samples; with `tau = 0` the logits themselves."""
    return logits - tau * class_counts.to(logits.dtype).pow(-0.25) if tau else logits


def cross_entropy_among_others(logits: Tensor, labels: Tensor) -> Tensor:  # [B, C], [B] -> scalar
    """The mean of `-log(e^{z_y} / sum_{c != y} e^{z_c})`; 0 for a sample without another class of finite logit."""
    own = labels.unsqueeze(1)
    others = logits.scatter(1, own, -torch.inf)
    alone = others.isneginf().all(1, keepdim=True)
    # Where nothing is left, the gradient of logsumexp would be NaN, even though `where` drops its value.
    losses = others.masked_fill(alone, 0.0).logsumexp(1, keepdim=True) - logits.gather(1, own)
    return torch.where(alone, 0.0, losses).mean()
