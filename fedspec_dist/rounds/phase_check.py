"""What must hold of a phase before the first round: its methods suit the model, the data, and each other."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.executors.batchable import require_batchable
from fedspec_dist.config import Config, Phase, methods
from fedspec_dist.core.buffers import MovingBuffers, moving_buffers
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.parameters import ParameterLayout, joined
from fedspec_dist.data.dataset import Dataset
from fedspec_dist.models.network import Network, evaluating
from fedspec_dist.rounds.making import (
    acts_on_features,
    filtered_layers,
    make,
    make_algorithm,
    make_filter,
    make_local_methods,
    make_task,
    trial,
)
from fedspec_dist.rounds.statistics import check_statistics
from fedspec_dist.tasks.base import Task


def check_patterns(config: Config, module: nn.Module, dataset: Dataset) -> list[ParameterLayout]:
    """The layout of each phase.

    Raises:
        ValueError: a pattern of a phase matches no parameter, or a method does not suit the model; found out now, not
            when its first round comes.
    """
    layouts = []
    for number, phase in enumerate(config.schedule()):
        prefix = f"phases.{number}." if config.phases else ""
        layout = ParameterLayout(module, phase.trainable, phase.server.shared, prefix)
        layout.select(phase.filter.layers, f"{prefix}filter.layers")
        layout.shared.select(phase.server.filter.layers, f"{prefix}server.filter.layers")
        check_phase(config, phase, module, layout, dataset, prefix)
        if config.runtime.executor == "batched":
            _check_batched(config, phase, module, layout, dataset)
        layouts.append(layout)
    return layouts


def check_phase(
    config: Config, phase: Phase, module: nn.Module, layout: ParameterLayout, dataset: Dataset, prefix: str
) -> None:
    """Build a phase's methods once, before the first round of the run, so that none fails when its phase comes.

    Raises:
        ValueError: a method does not suit the model or the layers that train; `prefix` is of the phase.
    """
    try:
        algorithm = make_algorithm(phase)
        if acts_on_features(phase):
            _check_features(config, phase, algorithm, module, layout, dataset)
        algorithm.bind(layout.segments)
        kept_ranges(phase, layout)
        for number, stint in enumerate(phase.local.schedule):
            layout.select(stint.train, f"local.schedule.{number}.train")
        for key, choice in (("filter", phase.filter), ("server.filter", phase.server.filter)):
            filtered = layout.shared if key == "server.filter" else layout
            make_filter(choice, filtered)
            if choice.type != "none" and not filtered_layers(choice, filtered):
                raise ValueError(
                    f"{key}: {choice.type} with min_size {choice.min_size} and min_dim {choice.min_dim} leaves no "
                    f"layer to filter; allowed: smaller ones, or {key}: none"
                )
        make(methods.WEIGHTS, phase.server.weights)
        for choice in phase.server.transforms:
            make(methods.TRANSFORMS, choice)
        make(methods.SERVER_OPTIMIZERS, phase.server.optimizer)
        _check_classes(config, phase, dataset)
        if acts_on_features(phase) and type(make_task(config, dataset)).output_loss is Task.output_loss:
            raise ValueError(
                f"local.algorithm: {phase.local.algorithm.type} needs a loss of the model's outputs, which task "
                f"{config.task.type} does not have (output_loss); allowed with it: a method that does not act on "
                f"features"
            )
        check_statistics(config, phase, module, layout, dataset, make_task(config, dataset), algorithm)
        make(methods.AGGREGATORS, phase.server.aggregator).check(layout.shared.segments)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def _check_batched(config: Config, phase: Phase, module: nn.Module, layout: ParameterLayout, dataset: Dataset) -> None:
    dataset = dataset.to(next(module.parameters()).device)
    batch, tried = trial(dataset), deepcopy(module).train()
    names = moving_buffers(tried, batch)
    if names and config.model.buffers == "freeze":
        MovingBuffers(tried, names).hold()
        names = ()
    with keyed(next(tried.parameters()).device, config.seed, "trial"):
        local = make_local_methods(phase, layout, make_algorithm(phase))
        task, on_features = make_task(config, dataset), acts_on_features(phase)
        require_batchable(tried, layout, task, local, batch, names, dataset.num_groups, on_features)


def _check_classes(config: Config, phase: Phase, dataset: Dataset) -> None:
    """Config knows the task, not the data."""
    chosen = [("local.algorithm", phase.local.algorithm), ("server.weights", phase.server.weights)]
    for key, choice in [*chosen, ("clients.attack", config.clients.attack)]:
        needed = "classes" in methods.FAMILIES[key].table[choice.type].needs
        if needed and (dataset.train.groups is None or dataset.num_groups != dataset.num_outputs):
            raise ValueError(
                f"{key}: got {choice.type}, which needs a class for each sample; the targets of "
                f"{config.data.dataset.type} are none; allowed with them: a method that needs no classes"
            )


def _check_features(
    config: Config,
    phase: Phase,
    algorithm: LocalAlgorithm,
    module: nn.Module,
    layout: ParameterLayout,
    dataset: Dataset,
) -> None:
    name = phase.local.algorithm.type
    if not isinstance(module, Network):
        raise ValueError(
            f"local.algorithm: {name} acts on features, but model.type {config.model.type} has no represent(): derive "
            "it from fedspec_dist.models.network.Network"
        )
    with torch.no_grad(), evaluating(module):
        inputs = trial(dataset.to(next(module.parameters()).device)).inputs
        shape = list(module.represent(inputs).shape[1:])  # type: ignore[arg-type]
    if len(shape) != 1:
        raise ValueError(
            f"local.algorithm: {name} acts on a row of features of each sample, but model.type {config.model.type} "
            f"gives "
            f"{shape}, one at each place; allowed with it: a method that needs no features"
        )
    behind = (f"{module.classifier}.", *(["projection."] if algorithm.needs_levels else []))
    if all(segment.name.startswith(behind) for segment in layout.segments):
        raise ValueError(
            f"trainable: got {phase.trainable}, with which nothing trains before the features that local.algorithm "
            f"{name} acts on: it would be FedAvg; train earlier layers too, or set local.algorithm: fedavg"
        )


def kept_ranges(phase: Phase, layout: ParameterLayout, prefix: str = "") -> list[tuple[int, int]]:
    """Where in the vector the parameters lie that clients keep.

    Raises:
        ValueError: a pattern matches none, or one that is shared.
    """
    key = f"{prefix}local.keep"
    if not phase.local.keep:
        return []
    kept = layout.select(phase.local.keep, key)
    if kept and kept[0].start < layout.num_shared:
        raise ValueError(
            f"{key}: got {phase.local.keep}, which matches {kept[0].name}; that is aggregated, since server.shared is "
            f"{phase.server.shared}; allowed: patterns of what trains and is not shared"
        )
    return joined([(segment.start, segment.stop) for segment in kept])
