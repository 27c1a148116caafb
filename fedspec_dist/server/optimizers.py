"""Server optimizers: from the aggregated direction to the next parameters, slice by slice."""

from __future__ import annotations

import torch
from torch import Tensor


class Sgd:
    """`theta + lr * direction`: the direction points downhill, so it is added.

    Reddi et al., "Adaptive Federated Optimization", 2021, algorithm 1 with SGD as the server optimizer.

    Raises:
        ValueError: `lr` is not positive.
    """

    def __init__(self, lr: float = 1.0) -> None:
        if not lr > 0:
            raise ValueError(f"server.optimizer.lr: must be above 0, got {lr}")
        self.lr = lr

    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        """The state for a slice of `num_columns` parameters: none."""
        return {}

    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        """New parameters `[n]` in the dtype of `theta [n]`, computed with `direction [n]` in float64 and rounded once.

        An optimizer with memory changes the tensors of `state` in place.
        """
        return (theta.to(torch.float64) + self.lr * direction).to(theta.dtype)
