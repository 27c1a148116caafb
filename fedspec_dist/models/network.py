"""What every model is: features of the images, and a linear layer on them."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional


class Network(nn.Module):
    """Class scores `classify(represent(images))`.

    A model defines `backbone` and names the attribute of its last linear layer in `classifier`.
    """

    classifier: ClassVar[str] = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.projection: nn.Module = nn.Identity()

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, d]
        """What the classifier gets where there is no projection; intermediate outputs go through `record`."""
        raise NotImplementedError

    def represent(self, images: Tensor, levels: list[Tensor] | None = None) -> Tensor:  # [B, C, H, W] -> [B, d]
        """The features that the classifier gets.

        To `levels`, when given, the outputs of the stem and of each stage are appended, first to last, as they are
        before their activation: `[B, channels, H, W]`, of fully connected layers `[B, width]`.
        """
        return self.projection(self.backbone(images, levels))

    def classify(self, features: Tensor) -> Tensor:  # [B, d] -> [B, num_classes]
        return getattr(self, self.classifier)(features)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, num_classes]
        return self.classify(self.represent(images))

    def add_projection(self, width: int) -> None:
        """Put a projection head of `width` outputs before the classifier, both with new random parameters."""
        old = getattr(self, self.classifier)
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
