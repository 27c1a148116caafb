"""The end of a local step: clip, weight decay, step. In this order, whatever came before.

A client's round begins with a new memory. Formulas are on vectors `[..., P]`, in place; a leading axis is a batch of
clients, each of which is clipped by its own norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# torch.nn.utils.clip_grad_norm_ adds the same to the norm.
_CLIP_EPSILON = 1e-6


class LocalOptimizer:
    """What all have: the norm to clip to, over all that trains of a client, and the weight decay; a momentum of SGD."""

    def __init__(self, momentum: float = 0.0, weight_decay: float = 0.0, clip_norm: float | None = None) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        """What is remembered between the steps of a round, as it is at first; vectors are of the shape of `like`."""
        return {}

    def clip(self, gradient: Tensor) -> None:
        """`g <- g * min(1, clip_norm / (||g|| + 1e-6))`, if there is a `clip_norm`."""
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.clip_norm / (norm + _CLIP_EPSILON)).clamp_(max=1.0))

    def step(self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: float) -> None:
        """Change `parameters`, of which `gradient` is the clipped one, and the memory; may write to `gradient`."""
        raise NotImplementedError


class LocalSgd(LocalOptimizer):
    """SGD as `torch.optim.SGD` defines it.

        g <- g + weight_decay * y
        v <- momentum * v + g
        y <- y - lr * v

    Weight decay comes after clipping and is never filtered.
    """

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(like)} if self.momentum else {}

    def step(self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: float) -> None:
        if self.weight_decay:
            gradient.add_(parameters, alpha=self.weight_decay)
        if self.momentum:
            gradient = state["velocity"].mul_(self.momentum).add_(gradient)
        parameters.add_(gradient, alpha=-lr)


class LocalAdam(LocalOptimizer):
    """Adam as `torch.optim.Adam` defines it, each client's round beginning at step 1.

        g <- g + weight_decay * y
        m <- beta1 m + (1 - beta1) g
        s <- beta2 s + (1 - beta2) g^2
        y <- y - lr (m / (1 - beta1^t)) / (sqrt(s / (1 - beta2^t)) + epsilon)

    D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    decoupled = False

    def __init__(
        self,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        *,
        beta1: float,
        beta2: float,
        epsilon: float,
    ) -> None:
        super().__init__(momentum, weight_decay, clip_norm)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        # How many steps each entry has made: parts of a model may train in some of them only.
        steps = torch.zeros_like(like)
        return {"mean": torch.zeros_like(like), "square": torch.zeros_like(like), "steps": steps}

    def step(self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], lr: float) -> None:
        if self.weight_decay:
            if self.decoupled:
                parameters.mul_(1 - lr * self.weight_decay)
            else:
                gradient.add_(parameters, alpha=self.weight_decay)
        mean, square, steps = state["mean"], state["square"], state["steps"]
        steps.add_(1)
        mean.lerp_(gradient, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        # beta^t as exp(t log beta), by entry; a beta of 0 leaves nothing to correct.
        correction1 = 1 - torch.pow(self.beta1, steps)
        correction2 = 1 - torch.pow(self.beta2, steps)
        denominator = (square.sqrt() / correction2.sqrt_()).add_(self.epsilon)
        parameters.sub_(mean.div(correction1).div_(denominator), alpha=lr)


class LocalAdamW(LocalAdam):
    """AdamW as `torch.optim.AdamW` defines it: `y <- y - lr weight_decay y` first, and no decay in the gradient.

    I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    decoupled = True
