"""What a model must be like for a federated run, tried on two images before the first round."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedspec_dist.config import Config
from fedspec_dist.data.prepared import Dataset


def check_model(config: Config, model: Any, dataset: Dataset) -> None:
    """Raises ValueError unless the model gives a number for each class, and training changes its parameters only."""
    name = config.model.type
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name} made a {type(model).__name__}; allowed is a torch.nn.Module")
    lazy = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"model: {name} has parameters without a shape ({', '.join(lazy[:3])}), as torch's Lazy layers have until "
            "they see data; give their sizes from input_shape in the constructor"
        )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"model: {name} has no parameters; there is nothing to train")
    images = dataset.train_images[:2]
    if len(images) < 2:  # a norm over the batch needs two
        images = torch.cat([images, images])
    tried = deepcopy(model).train()
    before = {key: buffer.clone() for key, buffer in tried.named_buffers()}
    with torch.no_grad():
        outputs = _outputs(name, tried, images)
    expected = (2, dataset.num_classes)
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != expected:
        found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise ValueError(
            f"model: {name} gives {found} for 2 images; allowed is a tensor of shape {list(expected)}, a number for "
            "each class of the data set"
        )
    moved = [key for key, buffer in tried.named_buffers() if not _equal(before[key], buffer)]
    if moved:
        remedy = "set model.norm: group" if hasattr(config.model, "norm") else "use torch.nn.GroupNorm or LayerNorm"
        raise ValueError(
            f"model: {name} changes buffers as it trains ({', '.join(moved[:3])}{', ...' if len(moved) > 3 else ''}), "
            "as the running statistics of batch norm do; they are no parameters, and every client would go on with "
            "another's. "
            f"{remedy[0].upper()}{remedy[1:]} instead; buffers that stay as they are, are fine"
        )
    for key, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"model: {name}: {key} has type {parameter.dtype}; allowed is torch.float32")


def _outputs(name: str, module: nn.Module, images: Tensor) -> Any:
    try:
        return module(images)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model: {name} cannot be applied to images of shape {list(images.shape[1:])} (channels, height, width), "
            f"which are the data set's: {reason}"
        ) from error


def _equal(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and bool(torch.equal(before, after) or (before.isnan() & after.isnan()).all())
