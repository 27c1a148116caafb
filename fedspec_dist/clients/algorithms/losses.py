"""Local methods that change the loss: calibrated logits (FedLC), terms of the features (MOON, FedDecorr)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors


class FedLC(LocalAlgorithm):
    """Logits calibrated by how often a client saw each class.

    The task's loss on calibrated logits `z'_c = z_c - tau n_c^(-1/4)`, `n_c` the client's samples of class c.

    Classes that the client does not have are left out exactly, `z'_c = -inf`, and get no gradient. Evaluation uses the
    logits as they are. With `denominator = "others"` the loss is the paper's literal `cross_entropy_among_others`,
    which is reported to collapse; FL-bench and FedDecorr use the ordinary softmax. Default tau: FL-bench.

    `tau = 0` is FedAvg bit for bit (with the denominator `all`); equal counts for all classes shift all logits alike.
    A client with one class has loss and gradient exactly 0, in both forms.

    J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu, "Federated Learning with Label Distribution Skew via Logits
    Calibration", ICML 2022, equation 8.
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


class Moon(LocalAlgorithm):
    """Model-contrastive federated learning.

    The task's loss plus `mu` times the `contrastive` loss of the features before the classifier.

    They are drawn to those of the global model and away from those of the client's own model after its last
    participation, which it keeps. A client that has taken no part yet has the task's loss only (the authors' program
    compares with its initial model). The authors put a projection head of 256 outputs before the classifier: that is
    `model.projection`. Three forward passes a step and one backward. Defaults: the authors' command for CIFAR.

    `mu = 0` is FedAvg bit for bit, and so is every first participation. A single client is FedAvg up to rounding: its
    previous model is the global one.

    Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021, algorithm 1, equation 3.
    """

    own = ("previous",)
    frozen_at = ("anchor", "previous")
    passes = 5 / 3  # a backward pass costs two forward passes

    def __init__(self, mu: float, temperature: float) -> None:
        self.mu = mu
        self.temperature = temperature

    def loss(self, model: Any, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        z = model.represent(inputs)
        task_loss = client.task_loss(model.classify(z), labels)
        if client.is_new or not self.mu:
            return task_loss
        z_global, z_previous = (_features(client.frozen[name], inputs) for name in self.frozen_at)
        return task_loss + self.mu * contrastive(z, z_global, z_previous, self.temperature)

    def end(self, vectors: LocalVectors, update: Tensor, client: Client) -> None:
        vectors.own["previous"].copy_(vectors.parameters)


@torch.no_grad()
def _features(model: Any, inputs: Tensor) -> Tensor:  # [B, ...] -> [B, d]
    return model.represent(inputs)


def contrastive(
    z: Tensor,  # [B, d], of the model in training
    z_global: Tensor,  # [B, d]
    z_previous: Tensor,  # [B, d]
    temperature: float,
) -> Tensor:  # scalar
    """The mean of `-log(e^{s_g} / (e^{s_g} + e^{s_p}))`, `s = cos(z, .) / temperature`.

    log 2, and no gradient at all, where `z_global` and `z_previous` are the same.
    """
    # The difference first, for that last exactness.
    difference = (unit(z) * (unit(z_global) - unit(z_previous))).sum(1) / temperature  # s_g - s_p
    return -logsigmoid(difference).mean()


def unit(features: Tensor) -> Tensor:  # [B, d] -> [B, d]
    """Every row brought to length 1, so that inner products are cosines.

    A row of zeros stays as it is, and its gradient is that of the identity; with the usual small number in place of the
    length, it would be a trillion times larger.
    """
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(length > 0, length, 1.0)


_EPSILON = 1e-8


class FedDecorr(LocalAlgorithm):
    """Features that do not collapse into few dimensions.

    The task's loss plus `beta` times the `decorrelation` of the features before the classifier.

    `beta = 0` is FedAvg bit for bit, and so is a batch of one sample. Default: the authors'.

    Y. Shi, J. Liang, W. Zhang, V. Y. F. Tan, S. Bai, "Towards Understanding and Mitigating Dimensional Collapse in
    Heterogeneous Federated Learning", ICLR 2023, in the form and scale of the authors' program.
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
