"""FedDecorr: features that do not collapse into few dimensions.

Y. Shi, J. Liang, W. Zhang, V. Y. F. Tan, S. Bai, "Towards Understanding and Mitigating Dimensional Collapse in
Heterogeneous Federated Learning", ICLR 2023, in the form and scale of the authors' program.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm

_EPSILON = 1e-8


class FedDecorr(LocalAlgorithm):
    """The task's loss plus `beta` times the `decorrelation` of the features before the classifier.

    `beta = 0` is FedAvg bit for bit, and so is a batch of one sample. Default: the authors'.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def loss(self, model: Any, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        features = model.represent(inputs)
        task_loss = client.task_loss(model.classify(features), labels)
        return task_loss + self.beta * decorrelation(features) if self.beta else task_loss


def decorrelation(features: Tensor) -> Tensor:  # [B, d] -> scalar
    """`1/B` times the mean square of the off-diagonal entries of `C = Z^T Z`, `Z` the standardised features.

    Every column of `Z` has its mean taken away and is divided by `sqrt(variance + 1e-8)`, the variance unbiased, so
    that `C = (B - 1) r` with the correlations r: the value grows with the batch. (The paper, as remembered, has
    `||r||_F^2 / d^2`; the program's scale is the one to which its beta belongs.)

    0 for a single sample or a single feature. A constant feature contributes 0. With two samples every correlation is
    1 or -1, the true gradient nearly zero and in float32 mostly rounding.
    """
    num_samples, width = features.shape
    if num_samples < 2 or width < 2:
        return features.new_zeros(())
    z = (features - features.mean(0)) / (features.var(0) + _EPSILON).sqrt()
    above_diagonal = (z.T @ z).triu(1)
    return 2 * above_diagonal.square().sum() / (num_samples * width * (width - 1))
