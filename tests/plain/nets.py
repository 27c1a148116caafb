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
