"""LeNet-5 with ReLU and max pooling, as federated-learning papers use it."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from .layers import InputShape, require_size
from .network import Network, record


class LeNet(Network):
    """Convolutions 6@5x5 and 16@5x5 without padding, each pooled, then 120, 84 and `num_classes` units.

    After Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proceedings of the IEEE
    86(11), 1998. 62,006 parameters at 3x32x32 and 10 classes.
    """

    classifier: ClassVar[str] = "fc3"

    def __init__(self, input_shape: InputShape, num_classes: int) -> None:
        super().__init__()
        require_size("lenet", input_shape, 16)
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _pooled(_pooled(height)) * _pooled(_pooled(width)), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, 84]
        x = functional.max_pool2d(functional.relu(record(levels, self.conv1(images))), 2)
        x = functional.max_pool2d(functional.relu(record(levels, self.conv2(x))), 2)
        x = functional.relu(record(levels, self.fc1(x.flatten(1))))
        return functional.relu(record(levels, self.fc2(x)))


def _pooled(size: int) -> int:
    """Size after a 5x5 convolution without padding and a 2x2 pool."""
    return (size - 4) // 2
