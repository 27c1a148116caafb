"""Networks in plain PyTorch, which the product is given by their paths."""

from __future__ import annotations

from torch import Tensor, nn


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.skip = nn.Sequential()
        if stride > 1:
            self.skip = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.skip(x)).relu()


class ResNet18(nn.Module):
    """With a sixteenth of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        widths = [(4, 4, 1), (4, 8, 2), (8, 16, 2), (16, 32, 2)]
        blocks = [b for before, width, stride in widths for b in (Block(before, width, stride), Block(width, width, 1))]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.conv(x)).relu()).mean((2, 3)))


class Mlp(nn.Module):
    def __init__(self, input_shape, num_outputs) -> None:
        super().__init__()
        self.body = nn.Linear(input_shape[0], 4)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Lstm(nn.Module):
    def __init__(self, vocabulary_size, num_outputs) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, 3)
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])
