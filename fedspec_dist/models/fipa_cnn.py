"""The three small bias-free CNNs of FIPA.

"Fisher-Informed Parameterwise Aggregation for Federated Learning with Heterogeneous Data", arXiv:2601.13608:
CNN-8k, CNN-23k and CNN-207k, with the layers of the released program. At 3x32x32 and 10 classes they have
8,748, 25,706 and 201,286 parameters. The flattened size follows from the image's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from .layers import InputShape, require_size
from .network import Network, record

_NUM_POOLS = 2


class FipaCnn(Network):
    """3x3 convolutions, a 2x2 max pool after each of the first two, two fully connected layers; no biases.

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
