"""Models: plain modules without buffers, usable with `torch.func`, sized from the data set's image shape.

Layer L1: may import its own modules, nothing else of the package.
To add a model: one file with a callable `(input_shape, num_classes, *, parameters) -> nn.Module`, one line in
`MODELS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from .cnn import Cnn
from .fipa_cnn import cnn8k, cnn23k, cnn207k
from .layers import InputShape
from .lenet import LeNet
from .mlp import Mlp
from .resnet import ResNet20

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "cnn8k": cnn8k,
    "cnn23k": cnn23k,
    "cnn207k": cnn207k,
    "lenet": LeNet,
    "resnet20": ResNet20,
}


def build(name: str, input_shape: InputShape, num_classes: int, **params: Any) -> nn.Module:
    """The model for images `(C, H, W)`, initialised by torch's defaults from torch's global generator.

    Raises:
        ValueError: an unknown model or parameter, a parameter out of range, or an image too small for the
        model.
    """
    if name not in MODELS:
        raise ValueError(f"model.type: {name!r} given; allowed: {', '.join(MODELS)}")
    known = parameters_of(MODELS[name])
    for key in params:
        if key not in known:
            raise ValueError(f"model.{key}: {name} has no such parameter; it takes {', '.join(known) or 'none'}")
    return MODELS[name](input_shape, num_classes, **params)


def parameters_of(model: Callable[..., nn.Module]) -> list[str]:
    """Names of the parameters a config may set: the keyword-only ones."""
    signature = inspect.signature(model)
    return [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
