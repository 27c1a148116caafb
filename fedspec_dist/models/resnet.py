"""ResNet-20 and ResNet-18 for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .network import InputShape, Network, normalisation, record

_WIDTHS = (16, 32, 64)
_BLOCKS_PER_STAGE = 3


class ResNet20(Network):
    """A 3x3 stem, three stages of three basic blocks with 16, 32 and 64 channels, the mean over space.

    K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2, with the shortcut of
    option B (1x1 convolution and norm where the shape changes) and group norm, as FIPA has it. 272,474
    parameters at 3 channels and 10 classes, 278,324 at 100; images of any size.
    """

    def __init__(self, input_shape: InputShape, num_classes: int, *, norm: str, dropout: float) -> None:
        super().__init__()
        self.conv = _convolution(input_shape[0], _WIDTHS[0], 3, 1, norm)
        self.norm = normalisation(norm, _WIDTHS[0])
        blocks, inputs = [], _WIDTHS[0]
        for stage, width in enumerate(_WIDTHS):
            for i in range(_BLOCKS_PER_STAGE):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(BasicBlock(inputs, width, stride, norm))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, 64]
        x = record(levels, self.norm(self.conv(images)))
        for i, block in enumerate(self.blocks, start=1):
            x = block(functional.relu(x))
            if i % _BLOCKS_PER_STAGE == 0:
                record(levels, x)
        return self.dropout(functional.relu(x).mean((2, 3)))


class ResNet18(Network):
    """A 3x3 stem, four stages of two basic blocks with `width` to `8 width` channels, the mean over space.

    K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1, with the stem that small images
    want. 11,173,962 parameters with 64 channels, batch norm, 3 input channels and 10 classes.
    """

    def __init__(self, input_shape: InputShape, num_classes: int, *, norm: str, width: int, dropout: float) -> None:
        super().__init__()
        self.conv = _convolution(input_shape[0], width, 3, 1, norm)
        self.norm = normalisation(norm, width)
        blocks, inputs = [], width
        for stage in range(4):
            for i in range(2):
                outputs = width * 2**stage
                blocks.append(BasicBlock(inputs, outputs, 2 if stage > 0 and i == 0 else 1, norm))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, 8 width]
        x = record(levels, self.norm(self.conv(images)))
        for i, block in enumerate(self.blocks, start=1):
            x = block(functional.relu(x))
            if i % 2 == 0:
                record(levels, x)
        return self.dropout(functional.relu(x).mean((2, 3)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with norms, added to the input or to its projection; the ReLU after it is the caller's."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, 3, stride, norm)
        self.norm1 = normalisation(norm, outputs)
        self.conv2 = _convolution(outputs, outputs, 3, 1, norm)
        self.norm2 = normalisation(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = _convolution(inputs, outputs, 1, stride, norm)
            self.shortcut = nn.Sequential(projection, normalisation(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return residual + self.shortcut(x)


def _convolution(inputs: int, outputs: int, size: int, stride: int, norm: str) -> nn.Conv2d:
    # A norm brings its own bias.
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=norm == "none")
