"""FedRCL: relaxed supervised contrastive learning.

S. Seo, J. Kim, G. Kim, B. Han, "Relaxed Contrastive Learning for Federated Learning", CVPR 2024, in the form of the
authors' program with its default weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.algorithms.losses import unit

_NUM_NEGATIVES = 2


class FedRCL(LocalAlgorithm):
    """The task's loss plus the `relaxed_contrastive` loss of what the stem and the stages put out.

    With both weights zero FedAvg bit for bit. In a batch with one class only the relaxation acts, in a batch of one
    sample neither.

    Raises:
        ValueError: in `loss`, the model has no hidden layers.
    """

    needs_levels = True

    def __init__(
        self,
        temperature: float,
        threshold: float,
        contrast_weight: float,
        relaxation_weight: float,
    ) -> None:
        self.temperature = temperature
        self.threshold = threshold
        self.contrast_weight = contrast_weight
        self.relaxation_weight = relaxation_weight

    def loss(self, model: Any, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        levels: list[Tensor] = []
        task_loss = client.task_loss(model.classify(model.represent(inputs, levels)), labels)
        if not self.contrast_weight and not self.relaxation_weight:
            return task_loss
        if not levels:
            raise ValueError("local.algorithm.type: fedrcl contrasts what hidden layers put out, the model has none")
        return task_loss + relaxed_contrastive(
            levels,
            labels,
            temperature=self.temperature,
            threshold=self.threshold,
            contrast_weight=self.contrast_weight,
            relaxation_weight=self.relaxation_weight,
        )


def relaxed_contrastive(
    levels: Sequence[Tensor],  # [B, channels, H, W] or [B, width] each
    labels: Tensor,  # [B]
    *,
    temperature: float = 0.05,
    threshold: float = 0.7,
    contrast_weight: float = 1.0,
    relaxation_weight: float = 1.0,
) -> Tensor:  # scalar
    """`contrast_weight` times `contrast` plus `relaxation_weight` times `relaxation`, averaged over the levels.

    A level is averaged over space and brought to length 1, so that its similarities are cosines.
    """
    same = labels.unsqueeze(1) == labels
    total = levels[0].new_zeros(())
    for level in levels:
        z = unit(level.flatten(2).mean(2) if level.dim() > 2 else level)
        similarities = z @ z.T
        if contrast_weight:
            total = total + contrast_weight * contrast(similarities, same, temperature)
        if relaxation_weight:
            total = total + relaxation_weight * relaxation(similarities, same, temperature, threshold)
    return total / len(levels)


def contrast(
    similarities: Tensor,  # [B, B]
    same: Tensor,  # [B, B] bool: the two have the same label
    temperature: float,
) -> Tensor:  # scalar
    """The mean of `-log(e^{s+} / (e^{s+} + sum e^{s-}))`, all divided by the temperature.

    `s+` belongs to the least similar sample of the same class, the sample itself included, `s-` to the two most similar
    of other classes; fewer where there are fewer, and 0 where there are none.
    """
    positive = similarities.masked_fill(~same, torch.inf).min(1, keepdim=True).values
    num_negatives = min(_NUM_NEGATIVES, len(similarities))
    negatives = similarities.masked_fill(same, -torch.inf).topk(num_negatives).values
    logits = torch.cat([positive, negatives], dim=1) / temperature
    return cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.int64))


def relaxation(
    similarities: Tensor,  # [B, B]
    same: Tensor,  # [B, B] bool
    temperature: float,
    threshold: float,
) -> Tensor:  # scalar
    """The mean of `log(1 + e^{(s - 1) / temperature})`, which pushes apart classes that have collapsed.

    `s` belongs to the least similar other sample of the same class; -1 if there is none, or if it is below `threshold`.
    """
    itself = torch.eye(len(same), dtype=torch.bool, device=same.device)
    least = similarities.masked_fill(~same | itself, torch.inf).min(1).values
    collapsed = (least >= threshold) & least.isfinite()
    return softplus((torch.where(collapsed, least, -1.0) - 1) / temperature).mean()
