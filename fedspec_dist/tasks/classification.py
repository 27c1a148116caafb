"""Classification with softmax cross-entropy."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class Classification:
    """Softmax cross-entropy over `outputs [B, C]` (logits) and `labels [B]` (int64 class numbers)."""

    num_sums: ClassVar[int] = 2  # of `metrics`

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch of `-log p(label)`, a scalar in the dtype of the outputs."""
        return cross_entropy(outputs, labels)

    def metrics(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`[sum of losses, number correct]`, float64: sums over blocks of a test set add up exactly as counted."""
        loss_sum = cross_entropy(outputs.to(torch.float64), labels, reduction="sum")
        num_correct = (outputs.argmax(-1) == labels).sum()
        return torch.stack([loss_sum, num_correct.to(torch.float64)])

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        """Mean loss and accuracy from the added-up `metrics` of `num_samples` samples.

        Raises:
            ValueError: there are no samples.
        """
        if num_samples < 1:
            raise ValueError(f"eval: needs at least one test sample, got {num_samples}")
        loss_sum, num_correct = sums.tolist()
        return {"test_loss": loss_sum / num_samples, "test_accuracy": num_correct / num_samples}

    def curvature(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """`S_n T_n` for `tangents [B, C, l]`, with `S_n = diag(p_n) - p_n p_n^T`, `p_n = softmax(outputs_n)`.

        `S_n` is the Hessian of the loss in the logits, and the Fisher matrix of the categorical distribution `p_n`.
        """
        probabilities, centred = _centre(outputs, tangents)
        return probabilities * centred

    def curvature_root(self, outputs: Tensor, jacobian: Tensor) -> Tensor:
        """`F_n J_n` for `jacobian [B, C, l]`, with `F_n = diag(sqrt p_n) (I - 1 p_n^T)`, so that `F_n^T F_n = S_n`."""
        probabilities, centred = _centre(outputs, jacobian)
        return probabilities.sqrt() * centred


def _centre(outputs: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = outputs.softmax(-1).unsqueeze(-1)
    return probabilities, tangents - (probabilities * tangents).sum(-2, keepdim=True)
