"""The end of a local step: clip, weight decay, momentum, step. In this order, whatever came before."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.clients.vectors import LocalVectors

# torch.nn.utils.clip_grad_norm_ adds the same to the norm.
_CLIP_EPSILON = 1e-6


class LocalSgd:
    """SGD as `torch.optim.SGD` defines it, on vectors `[..., P]`, in place.

        g <- g * min(1, clip_norm / (||g|| + 1e-6))
        g <- g + weight_decay * y
        v <- momentum * v + g
        y <- y - lr * v

    Weight decay comes after clipping and is never filtered. The norm is over all trainable parameters of a client.
    """

    def __init__(self, momentum: float = 0.0, weight_decay: float = 0.0, clip_norm: float | None = None) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm

    def step(self, vectors: LocalVectors, velocity: Tensor | None, lr: float) -> None:
        """One step; `velocity [..., P]` starts as zeros and is needed only with momentum."""
        gradient = vectors.gradient
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.clip_norm / (norm + _CLIP_EPSILON)).clamp_(max=1.0))
        if self.weight_decay:
            gradient.add_(vectors.parameters, alpha=self.weight_decay)
        if self.momentum:
            assert velocity is not None
            gradient = velocity.mul_(self.momentum).add_(gradient)
        vectors.parameters.add_(gradient, alpha=-lr)
