"""Means of the features that a model gives for a client's samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedspec_dist.clients.statistics.base import Material, Statistic
from fedspec_dist.core.parameters import with_parameters
from fedspec_dist.models.network import evaluating


class MeanFeatures(Statistic):
    """`(1/n) sum_i h(x_i)`, `[d]`: `h` are the features that the classifier gets of the model the client is sent.

    Of a sequence's features, `[T, d]`, it is the mean over the places as well. Added up in float64.
    """

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self._features = _Features(material.module)
        first = torch.zeros(1, dtype=torch.int64, device=material.examples.inputs[0].device)
        with torch.no_grad(), evaluating(material.module):
            self._num_features = material.examples.batch(first).through(self._features).shape[-1]
        self.width = self._num_features

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Tensor:
        total = theta.new_zeros(self._num_features, dtype=torch.float64)
        for _, features in self._batches(theta, samples):
            total += features.sum(dim=0)
        return total / max(len(samples), 1)

    def _batches(self, theta: Tensor, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions `[B]` of some samples at a time, and their features `[B, d]`, float64."""
        material = self.material
        model = with_parameters(self._features, material.layout, theta, "network.")
        for index, batch in material.batches(samples):
            with torch.no_grad():
                features = batch.through(model).double()
            yield index, features.flatten(1, -2).mean(dim=1) if features.dim() > 2 else features


class ClassFeatures(MeanFeatures):
    """The mean features of the samples of each class, `[C * d]`, class after class; zeros of a class without samples.

    How many samples each has is in `cohort.clients.class_counts`.
    """

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.width = material.num_outputs * self._num_features
        groups = material.examples.groups
        assert groups is not None
        self._classes = groups.to(material.examples.inputs[0].device)

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Tensor:
        total = theta.new_zeros(self.material.num_outputs, self._num_features, dtype=torch.float64)
        counts = total.new_zeros(len(total), 1)
        for index, features in self._batches(theta, samples):
            of_class = one_hot(self._classes[index], len(total)).double()  # [B, C]
            total += of_class.T @ features
            counts += of_class.sum(dim=0).unsqueeze(1)
        return (total / counts.clamp(min=1)).flatten()


class _Features(nn.Module):
    """A model that puts out its features."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        return self.network.represent(*inputs)  # type: ignore[operator]
