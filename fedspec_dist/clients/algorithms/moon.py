"""MOON: model-contrastive federated learning.

Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021, algorithm 1, equation 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors


class Moon(LocalAlgorithm):
    """The task's loss plus `mu` times the `contrastive` loss of the features before the classifier.

    They are drawn to those of the global model and away from those of the client's own model after its last
    participation, which it keeps. A client that has taken no part yet has the task's loss only (the authors' program
    compares with its initial model). The authors put a projection head of 256 outputs before the classifier: that is
    `model.projection`. Three forward passes a step and one backward. Defaults: the authors' command for CIFAR.

    `mu = 0` is FedAvg bit for bit, and so is every first participation. A single client is FedAvg up to rounding: its
    previous model is the global one.
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
