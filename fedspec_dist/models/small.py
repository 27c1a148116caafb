"""Small networks: a perceptron, the default convolutional network, LeNet, and the three of FIPA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from .network import InputShape, Network, normalisation, record, require_size

_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
_NUM_POOLS = 2  # of FIPA's networks


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
        dropout: float,
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), _ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(widths[-1], num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, last width]
        x = images.flatten(1)
        for layer in self.features:
            x = layer(x if isinstance(layer, nn.Linear) else record(levels, x))
        return self.dropout(x)


class Cnn(Network):
    """Three 3x3 convolutions, a pool after each of the first two, the mean over space.

    The convolutions have `width`, `2 width` and `4 width` channels. For images of 8x8 to 32x32 pixels, and
    any other size from 4x4: the mean takes what the pools leave.
    """

    def __init__(self, input_shape: InputShape, num_classes: int, *, norm: str, width: int, dropout: float) -> None:
        super().__init__()
        require_size("cnn", input_shape, 4)
        self.conv1 = nn.Conv2d(input_shape[0], width, 3, padding=1)
        self.norm1 = normalisation(norm, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm2 = normalisation(norm, 2 * width)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.norm3 = normalisation(norm, 4 * width)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(4 * width, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, 4 width]
        x = record(levels, self.norm1(self.conv1(images)))
        x = record(levels, self.norm2(self.conv2(functional.max_pool2d(functional.relu(x), 2))))
        x = record(levels, self.norm3(self.conv3(functional.max_pool2d(functional.relu(x), 2))))
        return self.dropout(functional.relu(x).mean((2, 3)))


class LeNet(Network):
    """Convolutions 6@5x5 and 16@5x5 without padding, each pooled, then 120, 84 and `num_classes` units.

    After Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proceedings of the IEEE
    86(11), 1998. 62,006 parameters at 3x32x32 and 10 classes.
    """

    classifier: ClassVar[str] = "fc3"

    def __init__(self, input_shape: InputShape, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        require_size("lenet", input_shape, 16)
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _pooled(_pooled(height)) * _pooled(_pooled(width)), 120)
        self.fc2 = nn.Linear(120, 84)
        self.dropout = nn.Dropout(dropout)
        self.fc3 = nn.Linear(84, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, 84]
        x = functional.max_pool2d(functional.relu(record(levels, self.conv1(images))), 2)
        x = functional.max_pool2d(functional.relu(record(levels, self.conv2(x))), 2)
        x = functional.relu(record(levels, self.fc1(x.flatten(1))))
        return self.dropout(functional.relu(record(levels, self.fc2(x))))


def _pooled(size: int) -> int:
    """Size after a 5x5 convolution without padding and a 2x2 pool."""
    return (size - 4) // 2


class FipaCnn(Network):
    """3x3 convolutions, a 2x2 max pool after each of the first two, two fully connected layers; no biases.

    "Fisher-Informed Parameterwise Aggregation for Federated Learning with Heterogeneous Data", arXiv:2601.13608:
    CNN-8k, CNN-23k and CNN-207k, with the layers of the released program. At 3x32x32 and 10 classes they have
    8,748, 25,706 and 201,286 parameters. The flattened size follows from the image's.

    Args:
        name: for the error about images that are too small.
        channels: output channels of each convolution, at least two.
        hidden: width between the fully connected layers.
    """

    classifier: ClassVar[str] = "fc2"

    def __init__(
        self, name: str, input_shape: InputShape, num_classes: int, channels: Sequence[int], hidden: int
    ) -> None:
        super().__init__()
        require_size(name, input_shape, 2**_NUM_POOLS)
        inputs, height, width = input_shape
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False)
            for before, after in zip([inputs, *channels[:-1]], channels, strict=True)
        )
        num_pixels = (height >> _NUM_POOLS) * (width >> _NUM_POOLS)
        self.fc1 = nn.Linear(channels[-1] * num_pixels, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, num_classes, bias=False)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, hidden]
        x = images
        for i, conv in enumerate(self.convs):
            x = functional.relu(record(levels, conv(x)))
            if i < _NUM_POOLS:
                x = functional.max_pool2d(x, 2)
        return functional.relu(record(levels, self.fc1(x.flatten(1))))


def cnn8k(input_shape: InputShape, num_classes: int) -> FipaCnn:
    """Convolutions of 4 and 8 channels, 16 hidden units."""
    return FipaCnn("cnn8k", input_shape, num_classes, channels=(4, 8), hidden=16)


def cnn23k(input_shape: InputShape, num_classes: int) -> FipaCnn:
    """Convolutions of 6 and 12 channels, 32 hidden units."""
    return FipaCnn("cnn23k", input_shape, num_classes, channels=(6, 12), hidden=32)


def cnn207k(input_shape: InputShape, num_classes: int) -> FipaCnn:
    """Convolutions of 12, 24 and 48 channels, no pool after the last, 61 hidden units."""
    return FipaCnn("cnn207k", input_shape, num_classes, channels=(12, 24, 48), hidden=61)
