"""What the lines of a config become: its task, its model and its methods."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.attacks import Attack
from fedspec_dist.clients.step import Filter, LocalMethods
from fedspec_dist.config import Choice, Config, Phase, expand_home, methods
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.parameters import ParameterLayout, Segment
from fedspec_dist.data.dataset import Dataset
from fedspec_dist.models.network import Network
from fedspec_dist.rounds.model_check import check_model
from fedspec_dist.tasks.base import Task

log = logging.getLogger(__name__)


def make_task(config: Config, dataset: Dataset) -> Task:
    """The task, which has seen what it works on.

    Raises:
        ValueError: it needs other targets.
    """
    made: Task = methods.TASKS[config.task.type].build(**config.task.parameters())
    made.check(dataset)
    own, listed = getattr(made, "headline", None), methods.headline_of(config.task.type)
    if own is not None and tuple(own) != listed:
        raise ValueError(
            f"task: {config.task.type} has headline {own!r} in its class and {listed!r} where it is registered; give "
            "both the same, or leave out that of `register`"
        )
    return made


def build_model(config: Config, dataset: Dataset) -> Network:
    """The model with the initial parameters of the config's seed, on the CPU; the global generators are left alone."""
    with keyed(torch.device("cpu"), config.seed, "model"):
        _refuse_too_large(config, dataset)
    with keyed(torch.device("cpu"), config.seed, "model"):
        model: Network = methods.MODELS[config.model.type].build(
            dataset.input_shape, dataset.num_outputs, **_model_arguments(config, dataset)
        )
        for note in getattr(model, "notes", ()) if config.model.type == "torchvision" else ():
            log.info("%s", note)
        if config.model.projection is not None:
            if not isinstance(model, Network):
                raise ValueError(
                    f"model.projection: {config.model.type} is no fedspec_dist.models.network.Network, to which a "
                    "projection head can be added; allowed: null"
                )
            model.add_projection(config.model.projection)
        check_model(config, model, trial(dataset), dataset.num_outputs, make_task(config, dataset))
        return model.double() if config.runtime.dtype == "float64" else model


def _model_arguments(config: Config, dataset: Dataset) -> dict[str, Any]:
    arguments = config.model.parameters(without=methods.MODEL_COMMON)
    if config.model.type == "torchvision" and config.model.pretrained is not None:
        arguments["pretrained"] = str(expand_home("model.pretrained", config.model.pretrained))
    if config.model.type == "module" and dataset.vocabulary is not None:
        return {"vocabulary_size": dataset.vocabulary, **arguments}
    if "tokens" not in methods.MODELS[config.model.type].needs:
        return arguments
    if dataset.vocabulary is None:
        raise ValueError(
            f"model: {config.model.type} reads tokens, which the samples of {config.data.dataset.type} are not; "
            "allowed: a data set of text, or another model"
        )
    return {"vocabulary_size": dataset.vocabulary, **arguments}


def _refuse_too_large(config: Config, dataset: Dataset) -> None:
    """Before any memory is asked for: the model is made once without storage, where it can be.

    Raises:
        ValueError: it has more parameters than a vector of them can have.
    """
    parameters = _model_arguments(config, dataset)
    try:
        with torch.device("meta"):
            model = methods.MODELS[config.model.type].build(dataset.input_shape, dataset.num_outputs, **parameters)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
    except Exception:  # a plugin's may not be made so; what is wrong with any is told when it is made in earnest
        return
    if num_parameters > methods.MAX_PARAMETERS:
        raise ValueError(
            f"model: {config.model.type} would have {num_parameters:,} parameters for inputs of shape "
            f"{list(dataset.input_shape)}; allowed: at most {methods.MAX_PARAMETERS:,}"
        )


def trial(dataset: Dataset) -> Batch:
    """Two samples, the least that a norm over the batch takes."""
    if len(dataset.train) > 1:
        return dataset.train.block(0, 2)
    return dataset.train.batch(torch.arange(2, device=dataset.train.inputs[0].device) % len(dataset.train))


def make_attack(config: Config) -> Attack:
    choice = config.clients.attack
    made: Attack = methods.ATTACKS[choice.type].build(**choice.parameters(without=methods.ATTACK_COMMON))
    return made


def make_algorithm(phase: Phase) -> LocalAlgorithm:
    made: LocalAlgorithm = make(methods.LOCAL_ALGORITHMS, phase.local.algorithm)
    return made


def make_local_methods(phase: Phase, layout: ParameterLayout, algorithm: LocalAlgorithm) -> LocalMethods:
    local = phase.local
    optimizer = methods.LOCAL_OPTIMIZERS[local.optimizer.type].build(
        local.momentum, local.weight_decay, local.clip_norm, **local.optimizer.parameters()
    )
    return LocalMethods(make_filter(phase.filter, layout), algorithm, optimizer)


def acts_on_features(phase: Phase) -> bool:
    return "features" in methods.LOCAL_ALGORITHMS[phase.local.algorithm.type].all_needs()


def make_filter(choice: Choice, layout: ParameterLayout) -> Filter:
    layers = filtered_layers(choice, layout)
    made: Filter = methods.FILTERS[choice.type].build(layers, **choice.parameters(without=methods.FILTER_COMMON))
    return made


def filtered_layers(choice: Choice, layout: ParameterLayout) -> list[Segment]:
    """Those that match `layers` and have at least `min_size` entries and `min_dim` axes."""
    return [
        segment
        for segment in layout.select(choice.layers)
        if segment.size >= choice.min_size and len(segment.shape) >= choice.min_dim
    ]


def make(table: Mapping[str, methods.Method], choice: Choice) -> Any:
    """Of a family whose methods have nothing but parameters."""
    return table[choice.type].build(**choice.parameters())
