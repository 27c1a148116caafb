"""Regression with squared errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedspec_dist.core.batch import Batch
from fedspec_dist.tasks.base import Task, suited


class Regression(Task):
    """The mean squared error of outputs `[B, D]` for targets `[B, D]`, real numbers; both may be `[B]` where D is 1.

    Metrics are `mse` and `mae`, means over all `n D` values, and `r2`, the mean over the D columns of
    `1 - sum (f - y)^2 / sum (y - mean y)^2`; a column of equal targets has `r2` 0.
    """

    def __init__(self) -> None:
        self._width = 1

    @property
    def num_sums(self) -> int:  # type: ignore[override]
        return 4 * self._width

    def check(self, data: Any) -> None:
        targets = data.train.targets
        if targets is None or not targets.is_floating_point() or targets.dim() > 2:
            raise ValueError(
                "task: regression needs real numbers, one or a row of them for each sample; the data set has "
                f"{suited(targets)}; in a csv file, whole numbers are amounts with data.kind: regression"
            )
        if targets[0].numel() != data.num_outputs:
            raise ValueError(
                f"data.dataset: num_outputs is {data.num_outputs}, but a target has {targets[0].numel()} values; "
                "allowed with task regression: as many"
            )
        self._width = data.num_outputs

    def check_outputs(self, model_name: str, outputs: Any, batch: Batch, num_outputs: int) -> None:
        super().check_outputs(model_name, outputs, batch, num_outputs)
        if outputs.numel() != len(batch) * num_outputs or len(outputs) != len(batch):
            raise ValueError(
                f"model: {model_name} gives shape {list(outputs.shape)} for {len(batch)} samples; allowed is "
                f"{[len(batch), num_outputs]}, a number for each value of a target"
            )

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples and values of `(f - y)^2`."""
        return mse_loss(outputs.flatten(1) if outputs.dim() > 1 else outputs.unsqueeze(1), _columns(targets, outputs))

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = (outputs.reshape(len(outputs), -1) - _columns(targets, outputs)).square().mean(1)
        return losses, torch.ones_like(losses)

    def outputs(self, model: Any, batch: Batch) -> Tensor:
        outputs: Tensor = batch.through(model)
        return outputs.unsqueeze(1) if outputs.dim() == 1 else outputs

    def metrics(self, model: Any, batch: Batch) -> Tensor:
        """Of each column the sums of `(f - y)^2`, `|f - y|`, `y` and `y^2`."""
        assert batch.targets is not None
        outputs = self.outputs(model, batch).double().flatten(1)
        targets = _columns(batch.targets, outputs)
        errors = outputs - targets
        return torch.cat([errors.square().sum(0), errors.abs().sum(0), targets.sum(0), targets.square().sum(0)])

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        squares, absolutes, totals, target_squares = sums.view(4, -1)
        spread = target_squares - totals.square() / num_samples
        # What is left of equal targets by rounding is no spread.
        varies = spread > 1e-12 * target_squares
        r2 = torch.where(varies, 1 - squares / torch.where(varies, spread, 1.0), 0.0)
        width = len(squares)
        return {
            "mse": float(squares.sum()) / (num_samples * width),
            "mae": float(absolutes.sum()) / (num_samples * width),
            "r2": float(r2.mean()),
        }

    def curvature(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """`T_n` itself: `S_n = I` is the Fisher matrix of a normal distribution of variance 1 around the outputs."""
        return tangents

    def curvature_root(self, outputs: Tensor, jacobian: Tensor) -> Tensor:
        return jacobian


def _columns(targets: Tensor, outputs: Tensor) -> Tensor:
    """`[B, D]`, in the type of the outputs."""
    return targets.reshape(len(targets), -1).to(outputs.dtype)
