"""A multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from .network import Network, record

_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class Mlp(Network):
    """Fully connected layers with an activation between them, on the flattened input; without `hidden`, linear.

    The default widths are the "2NN" of B. McMahan et al., "Communication-Efficient Learning of Deep Networks
    from Decentralized Data", AISTATS 2017.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        hidden: Sequence[int],
        activation: str,
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), _ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(widths[-1], num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, last width]
        x = images.flatten(1)
        for layer in self.features:
            x = layer(x if isinstance(layer, nn.Linear) else record(levels, x))
        return x
