"""Models from elsewhere: any module by its path, and torchvision's by their names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    except (Exception, SystemExit) as error:  # of the module's own code, any
        raise ValueError(
            f"model.path: {path} could not be loaded ({_reason(error)}); allowed is 'module:Name', in a module that "
            "python finds: in the folder from which the run is started, or on PYTHONPATH"
        ) from error
    if not callable(made):
        raise ValueError(f"model.path: {path} is a {type(made).__name__}; allowed is a class, or a function")
    if isinstance(made, type) and not issubclass(made, nn.Module):
        raise ValueError(f"model.path: {path} is a class, but no torch.nn.Module; derive it from that")
    known = {"input_shape": input_shape, "num_outputs": num_outputs, "num_classes": num_outputs}
    if vocabulary_size is not None:
        known["vocabulary_size"] = vocabulary_size
    given = {**{key: value for key, value in known.items() if key in _names(made)}, **(arguments or {})}
    try:
        inspect.signature(made).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"model.path: {path} is called with ({', '.join(f'{key}=...' for key in given)}), but takes "
            f"{inspect.signature(made)}: {error}. It may take input_shape, num_outputs and, of texts, vocabulary_size "
            "by these names; model.arguments gives it others"
        ) from error
    except ValueError:  # of some that are written in C there is no signature
        pass
    try:
        result: nn.Module = made(**given)
    except (Exception, SystemExit) as error:
        raise ValueError(f"model.path: {path} raised {_reason(error)} when it was made") from error
    return result


def _names(made: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(made).parameters
    except (ValueError, TypeError):
        return set()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in by_name}


def _reason(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)


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
            channels.
        stem: `cifar` begins a ResNet with a 3x3 convolution of stride 1 and no pool, for small images.
        pretrained: a file of weights, as `torch.save` or safetensors wrote the state of such a network. A first or
            last layer of another shape starts anew, as `notes` of the model then say. Nothing is downloaded.

    Raises:
        ValueError: there is no such network for classification, or a setting does not suit it.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(f"model.name: got {name!r}; allowed are networks of torchvision: {', '.join(sorted(known))}")
    if len(input_shape) != 3:
        raise ValueError(f"model: {name} takes images; the data set's inputs have shape {list(input_shape)}")
    channels, height, width = input_shape
    extra: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        extra = {"aux_logits": False, "init_weights": True}  # the second is their default, but not said they warn
    if name.startswith("vit_"):
        extra = _vit_size(name, height, width)
    made: Any = models.get_model(name, weights=None, num_classes=num_outputs, **extra)
    if stem == "cifar":
        if not isinstance(made, models.ResNet):
            raise ValueError(f"model.stem: got 'cifar' with {name}; allowed with it: imagenet (cifar is for ResNets)")
        made.conv1 = nn.Conv2d(channels, made.conv1.out_channels, 3, stride=1, padding=1, bias=False)
        made.maxpool = nn.Identity()
    elif channels != 3:
        first, part = next(_convolutions(made))
        settings = {key: getattr(part, key) for key in ("kernel_size", "stride", "padding", "dilation")}
        _put(made, first, nn.Conv2d(channels, part.out_channels, **settings, bias=part.bias is not None))
    if norm == "group":
        _with_group_norm(made)
    # Without storage, as where only its size is asked for, nothing can be loaded.
    if pretrained is not None and not next(made.parameters()).is_meta:
        made.notes = _load_pretrained(made, name, pretrained)
    return made


def _vit_size(name: str, height: int, width: int) -> dict[str, Any]:
    patch = int(name.rpartition("_")[2])
    if height != width or height % patch:
        raise ValueError(
            f"model.name: {name} cuts square images into patches of {patch}x{patch} pixels; the data set's are "
            f"{height}x{width}; allowed: another network, such as vit_small of the house with a smaller patch"
        )
    return {"image_size": height}


def _convolutions(made: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    return ((name, part) for name, part in made.named_modules() if isinstance(part, nn.Conv2d))


def _with_group_norm(made: nn.Module) -> None:
    for name, part in list(made.named_modules()):
        if isinstance(part, nn.BatchNorm2d):
            groups = next(n for n in range(min(_NUM_GROUPS, part.num_features), 0, -1) if part.num_features % n == 0)
            _put(made, name, nn.GroupNorm(groups, part.num_features, eps=part.eps))


def _put(made: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(made.get_submodule(parent), last, part)


def _load_pretrained(made: nn.Module, name: str, path: str) -> list[str]:
    """What was not taken from the file, in sentences."""
    state = _read(path)
    wanted = made.state_dict()
    first, last = next(_convolutions(made))[0], list(wanted)[-1].rpartition(".")[0]
    other = [key for key in wanted if key in state and state[key].shape != wanted[key].shape]
    # Files from before torch 0.4.1, torchvision's own among them, have no counters.
    missing = [key for key in wanted if key not in state and not key.endswith(".num_batches_tracked")]
    if wrong := [key for key in (*other, *missing) if key.rpartition(".")[0] not in (first, last)]:
        raise ValueError(
            f"model.pretrained: {path} does not fit {name}: {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''} missing or of another shape; allowed: the "
            "state of the same network, with the same norm, and for a vit images of the same size"
        )
    made.load_state_dict({key: value for key, value in state.items() if key in wanted and key not in other}, False)
    notes = []
    if anew := [*other, *missing]:
        notes.append(f"model.pretrained: {path} lacks, or has in other shapes, {', '.join(anew)}: these start anew")
    if left := [key for key in state if key not in wanted]:
        notes.append(f"model.pretrained: {len(left)} tensors of {path} have no place, such as {left[0]}")
    return notes


def _read(path: str) -> dict[str, Tensor]:
    """Name -> tensor, with the names that torchvision's networks have now."""
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds
        raise ValueError(
            f"model.pretrained: {path} cannot be read ({_reason(error)}); allowed: a file of weights alone, written by "
            "torch.save (.pt, .pth) or as .safetensors"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"model.pretrained: {path} holds no state of a network, which is a mapping of names to tensors"
        )
    # The files of the densenets have dots in these names, which torch no longer allows.
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key): value for key, value in state.items()}
