"""What several models share."""

from __future__ import annotations

from torch import nn

InputShape = tuple[int, int, int]
"""Channels, height, width."""

_NUM_GROUPS = 2  # as everywhere in the federated-learning code (FedRCL, FL-Simulator, FIPA)


def normalisation(norm: str, channels: int) -> nn.Module:
    """`group` is `GroupNorm(2, channels)`, `batch` is `BatchNorm2d(channels)`, `none` the identity."""
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
