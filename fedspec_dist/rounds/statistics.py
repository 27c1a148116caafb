"""What the server's methods of a phase ask of clients besides updates: who asks, whether it can be had, its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.statistics.base import Material, Statistic
from fedspec_dist.clients.vectors import widths
from fedspec_dist.config import Config, Phase, methods
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.dataset import Dataset
from fedspec_dist.models.network import Network
from fedspec_dist.tasks.base import Task


@dataclass(frozen=True)
class Asked:
    """A statistic, and the method that needs it."""

    name: str
    key: str  # of the method in the config, such as `server.aggregator`
    choice: Any  # what the config says of it

    @property
    def entry(self) -> methods.Method:
        return methods.STATISTICS[self.name]

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the method that the statistic has as well."""
        return {name: getattr(self.choice, name) for name in self.entry.parameters if hasattr(self.choice, name)}

    @property
    def rank(self) -> int:
        """The most rows that a client's matrix has; 0 of a statistic that is none."""
        return int(self.parameters["rank"]) if getattr(self.entry.load(), "is_matrix", False) else 0


def asked(phase: Phase) -> list[Asked]:
    """Every statistic once, in the order of their names: what all ranks gather alike.

    Raises:
        ValueError: a method needs one that is not there, or without a parameter that it must have; or two methods
            need the same one with different parameters.
    """
    found: dict[str, Asked] = {}
    for key, choice in _server_methods(phase):
        for name in sorted(methods.FAMILIES[key].table[choice.type].all_needs() - methods.NEEDS.keys()):
            if name not in methods.STATISTICS:
                allowed = ", ".join([*methods.STATISTICS, *methods.NEEDS])
                raise ValueError(f"{key}: {choice.type} needs {name!r}; allowed: {allowed}")
            new = Asked(name, key, choice)
            _require_parameters(new)
            old = found.setdefault(name, new)
            if old.parameters != new.parameters:
                raise ValueError(
                    f"{key}: {choice.type} needs {name} with {new.parameters}, but {old.key}: {old.choice.type} with "
                    f"{old.parameters}; allowed is one setting of both"
                )
    return [found[name] for name in sorted(found)]


def max_rank(phase: Phase) -> int:
    """The most eigenvectors that a client brings to a round of this phase."""
    return max((each.rank for each in asked(phase)), default=0)


def check_statistics(
    config: Config,
    phase: Phase,
    module: nn.Module,
    layout: ParameterLayout,
    dataset: Dataset,
    task: Task,
    algorithm: LocalAlgorithm,
) -> None:
    """Raises ValueError when what the phase's methods need cannot be had of this task, data, model or method.

    The local method is bound to its layers.
    """
    wanted = asked(phase)
    matrices = [each.name for each in wanted if each.rank]
    if len(matrices) > 1:
        raise ValueError(f"server.aggregator: {' and '.join(matrices)} are asked for; allowed is one of them a phase")
    for each in wanted:
        _check_needs(each, config, module, dataset, task)
    known = {each.name: each for each in wanted}
    for name, width in widths(algorithm.uploads).items():
        if width is not None and (type(width) is not int or width < 1):
            raise ValueError(
                f"local.algorithm: {phase.local.algorithm.type} gives uploads {name!r} the width {width!r}; allowed is "
                "a whole number of at least 1, or None for a vector as long as the model"
            )
        if name in known:
            raise ValueError(
                f"local.algorithm: {phase.local.algorithm.type} uploads {name!r}, which is also the statistic that "
                f"{known[name].key} {known[name].choice.type} needs; allowed is any other name"
            )
    build_statistics(phase, material(config, phase, module, layout, dataset, task))


def material(
    config: Config,
    phase: Phase,
    module: nn.Module,
    layout: ParameterLayout,
    dataset: Dataset,
    task: Task,
    spare_bytes: int = 0,
) -> Material:
    return Material(
        module,
        layout.shared,
        task,
        dataset.train,
        dataset.num_outputs,
        phase.local.batch_size,
        config.runtime.sketch_memory_mb * 2**20,
        spare_bytes,
    )


def build_statistics(phase: Phase, given: Material) -> dict[str, Statistic]:
    return {each.name: each.entry.build(given, **each.parameters) for each in asked(phase)}


@dataclass(frozen=True)
class Extras:
    """What a client sends besides its update, and what it takes to find it out."""

    rows: int = 0  # vectors as long as what is shared
    short: int = 0  # numbers in all short vectors together, float64
    rank: int = 0  # eigenvectors, at most
    statistics: Sequence[Statistic] = ()

    @classmethod
    def of(cls, phase: Phase, algorithm: LocalAlgorithm, given: Material) -> Extras:
        """Of a local method that is bound to its layers."""
        statistics = build_statistics(phase, given)
        sent = [*widths(algorithm.uploads).values(), *(s.width for s in statistics.values() if not s.is_matrix)]
        short = sum(width for width in sent if width is not None)
        return cls(sent.count(None), short, max_rank(phase), list(statistics.values()))

    def working_bytes(self, num_samples: int) -> int:
        """The most that a client of so many samples takes beside its training."""
        return max((statistic.working_bytes(num_samples) for statistic in self.statistics), default=0)


def _server_methods(phase: Phase) -> list[tuple[str, Any]]:
    chosen = [("server.aggregator", phase.server.aggregator), ("server.weights", phase.server.weights)]
    return [*chosen, *(("server.transforms", choice) for choice in phase.server.transforms)]


def _require_parameters(each: Asked) -> None:
    """Ours have them; a plugin's may not."""
    needed = [name for name, (_, default) in each.entry.parameters.items() if default is ...]
    if not set(needed) <= set(each.parameters):
        raise ValueError(
            f"{each.key}: {each.choice.type} needs {each.name}, so it must have the parameters {', '.join(needed)}"
            + (", as fipa has" if each.name == "sketches" else "")
        )


def _check_needs(each: Asked, config: Config, module: nn.Module, dataset: Dataset, task: Task) -> None:
    needs, who = each.entry.needs, f"{each.key}: {each.choice.type} needs {each.name}"
    if "curvature" in needs:
        task.check_curvature(dataset)
    if "features" in needs and not isinstance(module, Network):
        raise ValueError(
            f"{who}, but model.type {config.model.type} has no represent(): derive it from "
            "fedspec_dist.models.network.Network"
        )
    if "classes" in needs and (dataset.train.groups is None or dataset.num_groups != dataset.num_outputs):
        raise ValueError(
            f"{who}, which takes a class for each sample; the targets of {config.data.dataset.type} are none; allowed "
            "with them: a method that needs no classes"
        )
