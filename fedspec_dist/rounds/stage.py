"""A phase at work: the methods that its config names, bound to the model and to this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.executors.sequential import Filter, LocalMethods, SequentialExecutor
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.sketching import DiagonalFisher, Sketcher, as_function
from fedspec_dist.config import Config, Phase, methods
from fedspec_dist.core.cohort import Clients, Proxy
from fedspec_dist.core.parameters import ParameterLayout, Segment
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.models.network import Network
from fedspec_dist.processes.gpus import spare_memory
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.client_states import ClientStates
from fedspec_dist.rounds.federation import Federation, balanced_subset, make_attack, proxy_share, quota
from fedspec_dist.rounds.proxy import ServerProxy
from fedspec_dist.rounds.sampling import Workload, workload
from fedspec_dist.rounds.server import FederatedServer, ServerMethods
from fedspec_dist.tasks.classification import Classification

FISHER_DIAGONAL = "fisher_diagonal"


class Stage:
    """Executor, server and client states of one phase. A new phase starts with empty memories."""

    def __init__(
        self, config: Config, phase: Phase, module: nn.Module, federation: Federation, runtime: Runtime
    ) -> None:
        self.phase = phase
        self._config = config
        self._federation = federation
        self.task = Classification()
        self.layout = ParameterLayout(module, phase.trainable)
        self.augmentation = Augmentation.from_entries([entry.model_dump() for entry in config.data.augment])
        self._algorithm = make_algorithm(phase)
        self.attack = make_attack(config)
        images = federation.dataset.train_images
        self.executor = SequentialExecutor(
            module,
            self.layout,
            self.task.loss,
            self._local_methods(),
            images,
            federation.dataset.train_labels,
            self.augmentation.gather,
        )
        aggregator = _make(methods.AGGREGATORS, phase.server.aggregator)
        budget = config.runtime.sketch_memory_mb * 2**20
        self.sketcher: Sketcher | None = None
        if "sketches" in aggregator.needs:
            spare = spare_memory(runtime.device, runtime.environment)
            self.sketcher = Sketcher(module, self.layout, self.task, images, aggregator, budget, spare)
        self.fisher: DiagonalFisher | None = None
        if FISHER_DIAGONAL in aggregator.needs:
            self.fisher = DiagonalFisher(module, self.layout, self.task, images)
        self.uploads = (*self._algorithm.uploads, *([FISHER_DIAGONAL] if self.fisher else []))
        self.max_rank = max_rank(phase)
        self.columns = cut_columns(config, phase, len(self.layout), runtime.num_ranks, len(federation.clients))
        self.server = FederatedServer(
            ServerMethods(
                _make(methods.WEIGHTS, phase.server.weights),
                aggregator,
                self._algorithm,
                make_filter(phase.server.filter, self.layout) if phase.server.filter.type != "none" else None,
                _make(methods.SERVER_OPTIMIZERS, phase.server.optimizer),
                [_make(methods.TRANSFORMS, choice) for choice in phase.server.transforms],
            ),
            self.layout,
            self.columns,
            runtime.collectives,
            runtime.device,
            [len(samples) for samples in federation.clients],
            seed=config.seed,
            proxy=self._proxy(module) if proxy_share(phase) else None,
            test_class_counts=federation.test_class_counts,
        )
        self.states = ClientStates(self._algorithm.own, len(self.layout), len(federation.clients), runtime.collectives)

    @property
    def theta(self) -> Tensor:
        """The vector that the module's trainable parameters are views of, `[P]`."""
        return self.executor.vectors.parameters

    def lr(self, round_index: int) -> float:
        """`lr * lr_decay^t`, t counting rounds over all phases."""
        return float(self.phase.local.lr * self.phase.local.lr_decay**round_index)

    def loads(self, round_index: int, cohort: Sequence[int]) -> list[Workload]:
        """What each client of the cohort will do."""
        counts = self._federation.num_samples(cohort)
        key = (self._config.seed, self.phase.local, round_index)
        return [workload(*key, client, count) for client, count in zip(cohort, counts, strict=True)]

    def costs(self, loads: Sequence[Workload]) -> list[float]:
        """What assignment balances."""
        return [cost(self._algorithm, load) for load in loads]

    def clients(self, round_index: int, cohort: Sequence[int], loads: Sequence[Workload]) -> Clients:
        """What every rank knows of the cohort, whoever trains it."""
        lr, momentum = self.lr(round_index), self.phase.local.momentum
        steps = [load.num_steps for load in loads]
        return Clients(
            ids=torch.tensor(cohort, dtype=torch.int64),
            num_samples=torch.tensor(self._federation.num_samples(cohort), dtype=torch.int64),
            class_counts=torch.from_numpy(self._federation.class_counts[np.array(cohort, dtype=np.int64)]),
            num_steps=torch.tensor(steps, dtype=torch.int64),
            effective_steps=torch.tensor(
                [self._algorithm.effective_steps(count, lr, momentum) for count in steps], dtype=torch.float64
            ),
            lr=lr,
            population=len(self._federation.population),
            proximal=self._algorithm.proximal,
        )

    def _proxy(self, module: nn.Module) -> Callable[[int, Collectives], Proxy]:
        assert self._federation.proxy is not None
        images, labels = self._federation.proxy
        # The largest share of any phase was held out; this one may want less.
        everything = torch.cat([labels, self._federation.dataset.test_labels]).cpu().numpy()
        own = balanced_subset(labels.cpu().numpy(), quota(everything, proxy_share(self.phase)))
        index = torch.from_numpy(own).to(labels.device)
        images, labels = images.index_select(0, index), labels.index_select(0, index)
        batch_size = getattr(self.phase.server.weights, "batch_size", len(labels))
        forward = as_function(module, self.layout)
        return partial(ServerProxy, module, forward, self.task.loss, images, labels, batch_size, self._config.seed)

    def _local_methods(self) -> LocalMethods:
        local = self.phase.local
        return LocalMethods(
            filter=make_filter(self.phase.filter, self.layout),
            algorithm=self._algorithm,
            sgd=LocalSgd(local.momentum, local.weight_decay, local.clip_norm),
        )


def cost(algorithm: LocalAlgorithm, load: Workload) -> float:
    """The samples that a client will see, as often as they pass through the model."""
    return load.samples_seen * algorithm.passes + load.num_samples * algorithm.needs_full_gradient


def check_phase(config: Config, phase: Phase, module: nn.Module, layout: ParameterLayout, prefix: str) -> None:
    """Build a phase's methods once, before the first round of the run, so that none fails when its phase comes.

    Raises:
        ValueError: a method does not suit the model or the layers that train; `prefix` is of the phase.
    """
    try:
        algorithm = make_algorithm(phase)
        if algorithm.needs_features:
            _check_features(config, phase, algorithm, module, layout)
        algorithm.bind(layout.segments)
        for key, choice in (("filter", phase.filter), ("server.filter", phase.server.filter)):
            make_filter(choice, layout)
            if choice.type != "none" and not filtered_layers(choice, layout):
                raise ValueError(
                    f"{key}: {choice.type} with min_size {choice.min_size} and min_dim {choice.min_dim} leaves no "
                    f"layer to filter; allowed: smaller ones, or {key}: none"
                )
        _make(methods.WEIGHTS, phase.server.weights)
        for choice in phase.server.transforms:
            _make(methods.TRANSFORMS, choice)
        _make(methods.SERVER_OPTIMIZERS, phase.server.optimizer)
        _check_needs(phase)
        _make(methods.AGGREGATORS, phase.server.aggregator).check(layout.segments)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def _check_needs(phase: Phase) -> None:
    """Ours hold this by themselves; a plugin's may not."""
    choice, needs = phase.server.aggregator, aggregator_needs(phase)
    if unknown := sorted(set(needs) - {"sketches", FISHER_DIAGONAL}):
        raise ValueError(f"server.aggregator: {choice.type} needs {unknown[0]!r}; allowed: sketches, {FISHER_DIAGONAL}")
    settings = ("rank", "oversampling", "power_iterations")
    if "sketches" in needs and not all(hasattr(choice, name) for name in settings):
        raise ValueError(
            f"server.aggregator: {choice.type} needs sketches, so it must have the parameters {', '.join(settings)}, "
            "as fipa has"
        )


def _check_features(
    config: Config, phase: Phase, algorithm: LocalAlgorithm, module: nn.Module, layout: ParameterLayout
) -> None:
    name = phase.local.algorithm.type
    if not isinstance(module, Network):
        raise ValueError(
            f"local.algorithm: {name} acts on features, but model.type {config.model.type} has no represent(): derive "
            "it from fedspec_dist.models.network.Network"
        )
    behind = (f"{module.classifier}.", *(["projection."] if algorithm.needs_levels else []))
    if all(segment.name.startswith(behind) for segment in layout.segments):
        raise ValueError(
            f"trainable: got {phase.trainable}, with which nothing trains before the features that local.algorithm "
            f"{name} acts on: it would be FedAvg; train earlier layers too, or set local.algorithm: fedavg"
        )


def make_algorithm(phase: Phase) -> LocalAlgorithm:
    made: LocalAlgorithm = _make(methods.LOCAL_ALGORITHMS, phase.local.algorithm)
    return made


def aggregator_needs(phase: Phase) -> frozenset[str]:
    """What the phase's aggregator asks of clients besides updates."""
    needs: frozenset[str] = methods.AGGREGATORS[phase.server.aggregator.type].load().needs
    return needs


def filtered_layers(choice: Any, layout: ParameterLayout) -> list[Segment]:
    """Those that match `layers` and have at least `min_size` entries and `min_dim` axes."""
    return [
        segment
        for segment in layout.select(choice.layers)
        if segment.size >= choice.min_size and len(segment.shape) >= choice.min_dim
    ]


def make_filter(choice: Any, layout: ParameterLayout) -> Filter:
    layers = filtered_layers(choice, layout)
    made: Filter = methods.FILTERS[choice.type].build(layers, **choice.parameters(without=methods.FILTER_COMMON))
    return made


def max_rank(phase: Phase) -> int:
    """The most eigenvectors that a client brings to a round of this phase."""
    return int(getattr(phase.server.aggregator, "rank", 0)) if "sketches" in aggregator_needs(phase) else 0


def cut_columns(config: Config, phase: Phase, num_parameters: int, num_ranks: int, num_clients: int) -> Columns:
    """The column blocks of a phase's matrices, and who owns them."""
    cut = Columns.gathered if config.runtime.aggregation == "gather" else Columns.shared
    return cut(num_parameters, num_ranks, max_rank(phase) * config.cohort_size(num_clients))


def _make(table: Mapping[str, methods.Method], choice: Any) -> Any:
    return table[choice.type].build(**choice.parameters())
