"""Classification with softmax cross-entropy."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedspec_dist.core.batch import Batch
from fedspec_dist.tasks.base import Task, check_classes, suited


class Classification(Task):
    """Softmax cross-entropy over outputs `[B, C]` (logits) and targets `[B]` (int64 class numbers)."""

    num_sums: ClassVar[int] = 2

    def check(self, data: Any) -> None:
        targets = data.train.targets
        if targets is None or targets.dim() != 1 or targets.is_floating_point():
            raise ValueError(
                f"task: classification needs a class number for each sample; the data set has {suited(targets)}"
            )
        for split in (data.train, data.test):
            check_classes("classification", split.targets, data.num_outputs)

    def check_outputs(self, model_name: str, outputs: Any, batch: Batch, num_outputs: int) -> None:
        expected = (len(batch), num_outputs)
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) != expected:
            found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise ValueError(
                f"model: {model_name} gives {found} for {len(batch)} samples; allowed is a tensor of shape "
                f"{list(expected)}, a number for each class of the data set"
            )

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the batch of `-log p(target)`."""
        return cross_entropy(outputs, targets)

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = cross_entropy(outputs, targets, reduction="none")
        return losses, torch.ones_like(losses)

    def metrics(self, model: Any, batch: Batch) -> Tensor:
        """`[sum of losses, number correct]`."""
        assert batch.targets is not None
        outputs = self.outputs(model, batch)
        loss_sum = cross_entropy(outputs.to(torch.float64), batch.targets, reduction="sum")
        num_correct = (outputs.argmax(-1) == batch.targets).sum()
        return torch.stack([loss_sum, num_correct.to(torch.float64)])

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        loss_sum, num_correct = sums.tolist()
        return {"loss": loss_sum / num_samples, "accuracy": num_correct / num_samples}

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
