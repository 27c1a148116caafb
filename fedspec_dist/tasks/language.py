"""Classes of sequences, or of each of their places, such as the next word."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedspec_dist.core.batch import Batch
from fedspec_dist.tasks.base import Task, check_classes, suited
from fedspec_dist.tasks.classification import Classification


class Language(Task):
    """Softmax cross-entropy over outputs `[B, C]` and targets `[B]`, or over outputs `[B, T, V]` and targets `[B, T]`.

    Targets that are `ignore_index`, as those of padding, count nowhere: the loss is the mean over the others of a
    batch, and 0 where there are none. Metrics, over all that count: `loss`, `accuracy`, `perplexity = exp(loss)`.

    The curvature is that of `Classification`, for outputs `[B, C]` only: over the places of a sequence the loss is a
    mean of as many as count, which the targets decide, and no label enters a Fisher matrix.
    """

    num_sums: ClassVar[int] = 3

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index

    def check(self, data: Any) -> None:
        targets = data.train.targets
        if targets is None or targets.is_floating_point() or targets.dim() > 2:
            raise ValueError(
                "task: language needs a whole number for each sequence, or for each place of it; the data set has "
                f"{suited(targets)}"
            )
        otherwise = f", and task.ignore_index, which is {self.ignore_index}"
        for split in (data.train, data.test):
            counted = split.targets[split.targets != self.ignore_index]
            check_classes("language", counted, data.num_outputs, otherwise)

    def check_outputs(self, model_name: str, outputs: Any, batch: Batch, num_outputs: int) -> None:
        super().check_outputs(model_name, outputs, batch, num_outputs)
        assert batch.targets is not None
        expected = [*batch.targets.shape, num_outputs]
        if list(outputs.shape) != expected:
            raise ValueError(
                f"model: {model_name} gives shape {list(outputs.shape)} for {len(batch)} sequences; allowed is "
                f"{expected}, a number for each class or word, of each target; the networks of the house have "
                "model.outputs: sequence, or tokens for a target at each place"
            )

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean of `-log p(target)` over the targets that count."""
        flat = targets.flatten()
        losses = cross_entropy(outputs.flatten(0, -2), flat, ignore_index=self.ignore_index, reduction="sum")
        return losses / (flat != self.ignore_index).sum().clamp(min=1)

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        flat = targets.flatten()
        losses = cross_entropy(outputs.flatten(0, -2), flat, ignore_index=self.ignore_index, reduction="none")
        counts = (flat != self.ignore_index).to(losses.dtype)
        return losses.view(len(targets), -1).sum(1), counts.view(len(targets), -1).sum(1)

    def metrics(self, model: Any, batch: Batch) -> Tensor:
        """`[sum of losses, number correct, number of targets that count]`."""
        assert batch.targets is not None
        outputs, targets = self.outputs(model, batch).flatten(0, -2), batch.targets.flatten()
        counts = targets != self.ignore_index
        losses = cross_entropy(outputs.double(), targets, ignore_index=self.ignore_index, reduction="sum")
        correct = ((outputs.argmax(-1) == targets) & counts).sum()
        return torch.stack([losses, correct.double(), counts.sum().double()])

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        losses, correct, counted = sums.tolist()
        loss, accuracy = (losses / counted, correct / counted) if counted else (0.0, 0.0)
        return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 700.0))}

    def check_curvature(self, data: Any) -> None:
        if data.train.targets.dim() > 1:
            raise ValueError(
                "server.aggregator: got one that needs the Fisher matrix, which task language has for one target a "
                "sequence only, not for one at each place; allowed: one without, such as fedavg"
            )

    curvature = Classification.curvature
    curvature_root = Classification.curvature_root
