"""What the losses that compare directions of features share."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(features: Tensor) -> Tensor:  # [B, d] -> [B, d]
    """Every row brought to length 1, so that inner products are cosines.

    A row of zeros stays as it is, and its gradient is that of the identity; with the usual small number in place of the
    length, it would be a trillion times larger.
    """
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(length > 0, length, 1.0)
