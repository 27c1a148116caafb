"""What every model is, features of the inputs and a linear layer on them, and what several models share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

InputShape = tuple[int, int, int]
"""Channels, height, width."""

_NORMS = ("group", "batch", "none")
_NUM_GROUPS = 2  # as everywhere in the federated-learning code (FedRCL, FL-Simulator, FIPA)


class Network(nn.Module):
    """Class scores `classify(represent(inputs))`.

    A model defines `backbone` and names the attribute of its last linear layer in `classifier`.
    """

    classifier: ClassVar[str] = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.projection: nn.Module = nn.Identity()

    def backbone(self, inputs: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, d]
        """What the classifier gets where there is no projection; intermediate outputs go through `record`."""
        raise NotImplementedError

    def represent(self, inputs: Tensor, levels: list[Tensor] | None = None) -> Tensor:  # [B, C, H, W] -> [B, d]
        """The features that the classifier gets.

        To `levels`, when given, the outputs of the stem and of each stage are appended, first to last, as they are
        before their activation: `[B, channels, H, W]`, of fully connected layers `[B, width]`.
        """
        return self.projection(self.backbone(inputs, levels))

    def classify(self, features: Tensor) -> Tensor:  # [B, d] -> [B, num_classes]
        return getattr(self, self.classifier)(features)

    def forward(self, inputs: Tensor) -> Tensor:  # [B, C, H, W] -> [B, num_classes]
        return self.classify(self.represent(inputs))

    def add_projection(self, width: int) -> None:
        """Put a projection head of `width` outputs before the classifier, both with new random parameters.

        Raises:
            ValueError: the classifier's weights are those of another layer too.
        """
        old = getattr(self, self.classifier)
        names = [name for name, part in self.named_parameters(remove_duplicate=False) if part is old.weight]
        if len(names) > 1:
            raise ValueError(
                f"model.projection: {width} given, but {' and '.join(names)} are one, and a projection gives the last "
                "layer another size; allowed: null, or untied weights"
            )
        self.projection = Projection(old.in_features, width)
        setattr(self, self.classifier, nn.Linear(width, old.out_features, bias=old.bias is not None))


class Projection(nn.Module):
    """`z = l2(relu(l1(h)))`, `l1` as wide as `h`.

    Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021, section 3.3.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.l1 = nn.Linear(inputs, inputs)
        self.l2 = nn.Linear(inputs, width)

    def forward(self, h: Tensor) -> Tensor:  # [B, inputs] -> [B, width]
        return self.l2(functional.relu(self.l1(h)))


def record(levels: list[Tensor] | None, x: Tensor) -> Tensor:
    """`x`; it is appended to the levels where they are asked for."""
    if levels is not None:
        levels.append(x)
    return x


def normalisation(norm: str, channels: int) -> nn.Module:
    """`GroupNorm(2, channels)`, `BatchNorm2d(channels)` or the identity.

    Raises:
        ValueError: any other name.
    """
    if norm not in _NORMS:
        raise ValueError(f"model.norm: {norm!r} given; allowed: {', '.join(_NORMS)}")
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(_NUM_GROUPS, channels) if norm == "group" else nn.Identity()


def require_size(model: str, input_shape: InputShape, minimum: int) -> None:
    """Raises ValueError when the image is too small for the model's pooling."""
    _, height, width = input_shape
    if min(height, width) < minimum:
        raise ValueError(
            f"model.type: {model} needs images of at least {minimum}x{minimum} pixels; "
            f"the data set's are {height}x{width}"
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In eval mode inside; afterwards every part is as it was, such as a backbone that its owner keeps in eval mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
