"""The small convolutional network of the default configuration."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .layers import InputShape, normalisation, require_size
from .network import Network, record


class Cnn(Network):
    """Three 3x3 convolutions, a pool after each of the first two, the mean over space.

    The convolutions have `width`, `2 width` and `4 width` channels. For images of 8x8 to 32x32 pixels, and
    any other size from 4x4: the mean takes what the pools leave.
    """

    def __init__(self, input_shape: InputShape, num_classes: int, *, norm: str, width: int) -> None:
        super().__init__()
        require_size("cnn", input_shape, 4)
        self.conv1 = nn.Conv2d(input_shape[0], width, 3, padding=1)
        self.norm1 = normalisation(norm, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm2 = normalisation(norm, 2 * width)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.norm3 = normalisation(norm, 4 * width)
        self.fc = nn.Linear(4 * width, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, 4 width]
        x = record(levels, self.norm1(self.conv1(images)))
        x = record(levels, self.norm2(self.conv2(functional.max_pool2d(functional.relu(x), 2))))
        x = record(levels, self.norm3(self.conv3(functional.max_pool2d(functional.relu(x), 2))))
        return functional.relu(x).mean((2, 3))
