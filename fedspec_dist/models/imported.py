"""Models from elsewhere: any module by its path, and torchvision's by their names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_NUM_GROUPS = 32  # as torchvision's and detectron's networks have them; fewer where they do not divide the channels


def module(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    path: str,
    arguments: Mapping[str, Any] | None,
    vocabulary_size: int | None = None,
) -> nn.Module:
    """What `package.module:Name` makes: a class, or a function, that takes nothing or what it names of `input_shape`,
    `num_outputs` (or `num_classes`) and `vocabulary_size`, and `arguments` by name.

    Raises:
        ValueError: it is not there, takes something else, or raises.
    """
    where, _, name = path.partition(":")
    try:
        made = importlib.import_module(where)
        for part in name.split("."):
            made = getattr(made, part)
    except Exception as error:  # of the module's own code, any
        raise ValueError(
            f"model.path: {path!r} could not be loaded ({type(error).__name__}: {error}); allowed is 'module:Name', "
            f"in a "
            "module that python finds: in the folder from which the run is started, or on PYTHONPATH"
        ) from error
    if not callable(made):
        raise ValueError(f"model.path: {path} is a {type(made).__name__}; allowed is a class, or a function")
    known = {"input_shape": input_shape, "num_outputs": num_outputs, "num_classes": num_outputs}
    if vocabulary_size is not None:
        known["vocabulary_size"] = vocabulary_size
    given = {**{key: value for key, value in known.items() if key in _names(made)}, **(arguments or {})}
    try:
        inspect.signature(made).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"model.path: {path} is called with ({', '.join(f'{key}=...' for key in given)}), but takes "
            f"{inspect.signature(made)}: {error}. It may take input_shape, num_outputs and vocabulary_size by these "
            f"names; "
            "model.arguments gives it others"
        ) from error
    except ValueError:  # of some that are written in C there is no signature
        pass
    try:
        result: nn.Module = made(**given)
    except Exception as error:
        raise ValueError(f"model.path: {path} raised {type(error).__name__} when it was made: {error}") from error
    return result


def _names(made: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(made).parameters
    except (ValueError, TypeError):
        return set()
    return {name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD}


def torchvision(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    name: str,
    norm: str,
    stem: str,
    pretrained: str | None,
) -> nn.Module:
    """`torchvision.models.NAME` with a last layer of `num_outputs`, and a first one for the images' channels.

    Args:
        norm: `group` puts `GroupNorm` in the place of every batch norm, with 32 groups or as many as divide the
        channels. stem: `cifar` begins a ResNet with a 3x3 convolution of stride 1 and no pool, for small images.
        pretrained: a file of weights, as `torch.save` or safetensors wrote the state of such a network. A last or a
        first
            layer of another shape starts anew.

    Raises:
        ValueError: there is no such network for classification, or a setting does not suit it.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(f"model.name: got {name!r}; allowed are networks of torchvision: {', '.join(sorted(known))}")
    channels, height, width = input_shape if len(input_shape) == 3 else (0, 0, 0)
    if not channels:
        raise ValueError(f"model: {name} takes images; the data set's inputs have shape {list(input_shape)}")
    extra: dict[str, Any] = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    if name.startswith("vit_"):
        extra = _vit_size(name, height, width)
    made: nn.Module = models.get_model(name, weights=None, num_classes=num_outputs, **extra)
    if stem == "cifar":
        if not isinstance(made, models.ResNet):
            raise ValueError(f"model.stem: got 'cifar' with {name}; allowed with it: imagenet (cifar is for ResNets)")
        made.conv1 = nn.Conv2d(channels, made.conv1.out_channels, 3, stride=1, padding=1, bias=False)
        made.maxpool = nn.Identity()
    elif channels != 3:
        _replace_first_convolution(made, channels)
    if norm == "group":
        _with_group_norm(made)
    if pretrained is not None:
        _load_pretrained(made, name, pretrained)
    return made


def _vit_size(name: str, height: int, width: int) -> dict[str, Any]:
    patch = int(name.rpartition("_")[2])
    if height != width or height % patch:
        raise ValueError(
            f"model.name: {name} cuts square images into patches of {patch}x{patch} pixels; the data set's are "
            f"{height}x{width}; allowed: another network, such as vit_small of the house with a smaller patch"
        )
    return {"image_size": height}


def _replace_first_convolution(made: nn.Module, channels: int) -> None:
    for name, part in made.named_modules():
        if isinstance(part, nn.Conv2d):
            settings = {key: getattr(part, key) for key in ("kernel_size", "stride", "padding", "dilation")}
            new = nn.Conv2d(channels, part.out_channels, **settings, bias=part.bias is not None)
            _put(made, name, new)
            return


def _with_group_norm(made: nn.Module) -> None:
    for name, part in list(made.named_modules()):
        if isinstance(part, nn.BatchNorm2d):
            groups = next(n for n in range(min(_NUM_GROUPS, part.num_features), 0, -1) if part.num_features % n == 0)
            _put(made, name, nn.GroupNorm(groups, part.num_features, eps=part.eps))


def _put(made: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(made.get_submodule(parent), last, part)


def _load_pretrained(made: nn.Module, name: str, path: str) -> None:
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model.pretrained: {path} cannot be read: {reason}") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(
            f"model.pretrained: {path} holds no state of a network, which is a mapping of names to tensors"
        )
    wanted = made.state_dict()
    ends = {next(iter(wanted)).rpartition(".")[0], list(wanted)[-1].rpartition(".")[0]}
    other = [key for key in wanted if key in state and state[key].shape != wanted[key].shape]
    missing = [key for key in wanted if key not in state]
    left = [key for key in state if key not in wanted]
    if wrong := [key for key in (*other, *missing) if key.rpartition(".")[0] not in ends]:
        raise ValueError(
            f"model.pretrained: {path} does not fit {name}: {', '.join(wrong[:5])} missing or of another shape"
            f"{f', {len(left)} names left over' if left else ''}; allowed: the state of the same network, with the "
            f"same norm"
        )
    made.load_state_dict({key: value for key, value in state.items() if key not in (*other, *left)}, strict=False)
