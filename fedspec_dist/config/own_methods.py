"""What a method of a user's own must be like, told in a sentence when it is not. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Form:
    """Of a family: the arguments before the method's own parameters, what its classes have, and where that stands."""

    called_with: str
    members: tuple[str, ...]
    example: str


_FILTER = Form("segments", ("prepare", "__call__"), "fedspec_dist.filters.layerwise.LayerFilter")
FORMS = {
    "data.dataset": Form(
        "root, download, seed",
        ("embedded", "download", "fingerprint", "load"),
        "fedspec_dist.data.source.Source",
    ),
    "data.partition": Form("samples, num_clients, rng", (), "fedspec_dist.data.partitions"),
    "task": Form("", ("headline", "num_sums", "loss", "metrics", "summarize"), "fedspec_dist.tasks.base.Task"),
    "model": Form("input_shape, num_classes", (), "fedspec_dist.models.network.Network"),
    "filter": _FILTER,
    "server.filter": _FILTER,
    "local.algorithm": Form(
        "", ("own", "begin", "correct", "end"), "fedspec_dist.clients.algorithms.base.LocalAlgorithm"
    ),
    "local.optimizer": Form(
        "momentum, weight_decay, clip_norm",
        ("initial_state", "clip", "step"),
        "fedspec_dist.clients.optimizers.LocalOptimizer",
    ),
    "statistics": Form(
        "material",
        ("when", "is_matrix", "width", "compute", "working_bytes"),
        "fedspec_dist.clients.statistics.base.Statistic",
    ),
    "server.transforms": Form("", ("initial_state", "apply"), "fedspec_dist.server.transforms.privacy.Clip"),
    "clients.attack": Form("", ("labels", "spoil"), "fedspec_dist.clients.attacks.Attack"),
    "server.aggregator": Form("", ("check", "direction"), "fedspec_dist.server.protocols.AnyLayers"),
    "server.weights": Form("", ("initial_state", "weigh"), "fedspec_dist.server.weights.shares.Stateless"),
    "server.optimizer": Form("", ("initial_state", "step"), "fedspec_dist.server.protocols.ServerOptimizer"),
}


def load(key: str, target: str) -> Any:
    """The class or function `module:Name` of a family.

    Raises:
        ValueError: it is not there, or has not what its family's have.
    """
    module, _, name = target.partition(":")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: {target} could not be loaded ({error}); `register` names it as 'module:Class', in a module that "
            "python finds"
        ) from error
    form = FORMS[key]
    missing = [member for member in form.members if not _has(made, member)] if isinstance(made, type) else []
    if missing:
        raise ValueError(
            f"{key}: {target} has no {', '.join(missing)}; derive it from {form.example}, or do as that does"
        )
    if not callable(made):
        raise ValueError(
            f"{key}: {target} is a {type(made).__name__}; allowed is a class, or a function that makes one"
        )
    return made


def check_call(
    key: str, target: str, made: Any, arguments: tuple[Any, ...], named: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Raises ValueError when the class or function does not take what it is about to be called with."""
    try:
        signature = inspect.signature(made)
    except (ValueError, TypeError):  # of some that are written in C
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        expected = ", ".join(part for part in (FORMS[key].called_with, *(f"{name}=..." for name in own)) if part)
        raise ValueError(
            f"{key}: {target} is called with ({expected}), but takes {signature}: {error}. Let it take these: what "
            "comes first, and by name the parameters that `register` gives it"
        ) from error


def _has(made: type, member: str) -> bool:
    # Every class can be called; what counts is whether its objects can.
    return any(member in vars(kind) for kind in made.__mro__ if kind is not object)
