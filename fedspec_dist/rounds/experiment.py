"""From a config to the objects of a run: data, clients, model, and the methods of each phase."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspec_dist import methods, seeding
from fedspec_dist.clients.sequential import LocalMethods, SequentialExecutor
from fedspec_dist.clients.sgd import LocalSgd
from fedspec_dist.clients.sketching import Sketcher
from fedspec_dist.config import Config, Phase, expand_home
from fedspec_dist.data.augment import Augmentation
from fedspec_dist.data.prepared import Dataset, load
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.runtime import Runtime
from fedspec_dist.parameters import ParameterLayout
from fedspec_dist.rounds.server import FederatedServer
from fedspec_dist.tasks.classification import Classification

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Federation:
    """The data set and who holds what of it."""

    dataset: Dataset
    clients: Sequence[np.ndarray]  # client -> positions in the training set

    @property
    def population(self) -> list[int]:
        """Clients with data; one without cannot train and never takes part."""
        return [client for client, samples in enumerate(self.clients) if len(samples)]

    def num_samples(self, cohort: Sequence[int]) -> list[int]:
        return [len(self.clients[client]) for client in cohort]


def load_federation(config: Config, prepares: bool) -> Federation:
    """The data on the CPU, and its partition.

    Raises:
        ValueError: the data set is missing or unsound, or cannot be cut as asked.
    """
    data = config.data
    entry = methods.DATASETS[data.dataset.type]
    # An embedded data set needs no folder, and so no home directory, which containers may lack.
    root = Path(data.root) if entry.load().embedded else expand_home("data.root", data.root)
    source = entry.build(root=root, download=data.download, seed=config.seed, **data.dataset.parameters())
    dataset = load(data.dataset.type, source, root, prepares=prepares, embedded=source.embedded)
    clients = methods.PARTITIONS[data.partition.type].build(
        dataset.train_labels.numpy(),
        data.partition.clients,
        seeding.generator(config.seed, "partition"),
        **data.partition.parameters(without=["clients"]),
    )
    federation = Federation(dataset, clients)
    empty = len(clients) - len(federation.population)
    if empty:
        log.info("%d of %d clients have no data and never take part", empty, len(clients))
    if config.cohort_size() > len(federation.population):
        raise ValueError(
            f"clients_per_round: got {config.cohort_size()}, but only {len(federation.population)} of "
            f"{len(clients)} clients have data; allowed: at most {len(federation.population)}"
        )
    return federation


def build_model(config: Config, dataset: Dataset) -> nn.Module:
    """The model with the initial parameters of the config's seed, on the CPU; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(config.seed, "model"))
        model = methods.MODELS[config.model.type]
        return model.build(dataset.input_shape, dataset.num_classes, **config.model.parameters())


class Stage:
    """A phase at work: the methods it names, bound to the model and to this rank."""

    def __init__(
        self, config: Config, phase: Phase, module: nn.Module, federation: Federation, runtime: Runtime
    ) -> None:
        self.phase = phase
        self.task = Classification()
        self.layout = ParameterLayout(module, phase.trainable)
        self.augmentation = Augmentation.from_entries([entry.model_dump() for entry in config.data.augment])
        dataset = federation.dataset
        self.executor = SequentialExecutor(
            module,
            self.layout,
            self.task.loss,
            _local_methods(phase, self.layout),
            dataset.train_images,
            dataset.train_labels,
            self.augmentation.gather,
        )
        aggregator = _make(methods.AGGREGATORS, phase.server.aggregator)
        budget = config.runtime.sketch_memory_mb * 2**20
        self.sketcher = (
            Sketcher(module, self.layout, self.task, dataset.train_images, aggregator, budget)
            if aggregator.needs_sketches
            else None
        )
        self.max_rank = max_rank(phase)
        self.columns = cut_columns(config, phase, len(self.layout), runtime.num_ranks)
        self.server = FederatedServer(
            aggregator,
            partial(methods.WEIGHTS[phase.server.weights.type].build, **phase.server.weights.parameters()),
            _make(methods.SERVER_OPTIMIZERS, phase.server.optimizer),
            self.columns,
            runtime.collectives,
            runtime.device,
        )

    @property
    def theta(self) -> Tensor:
        """The vector that the module's trainable parameters are views of, `[P]`."""
        return self.executor.vectors.parameters

    def lr(self, round_index: int) -> float:
        """`lr * lr_decay^t`, t counting rounds over all phases."""
        return float(self.phase.local.lr * self.phase.local.lr_decay**round_index)


def cost(phase: Phase, num_samples: int) -> int:
    """What assignment balances: the samples that a client of this size sees in a round."""
    return num_samples * phase.local.epochs


def max_rank(phase: Phase) -> int:
    """The most eigenvectors that a client brings to a round of this phase."""
    return getattr(phase.server.aggregator, "rank", 0)


def cut_columns(config: Config, phase: Phase, num_parameters: int, num_ranks: int) -> Columns:
    """The column blocks of a phase's matrices, and who owns them."""
    cut = Columns.gathered if config.runtime.aggregation == "gather" else Columns.shared
    return cut(num_parameters, num_ranks, max_rank(phase) * config.cohort_size())


def _local_methods(phase: Phase, layout: ParameterLayout) -> LocalMethods:
    local = phase.local
    segments = layout.select(phase.filter.layers)
    return LocalMethods(
        filter=methods.FILTERS[phase.filter.type].build(segments, **phase.filter.parameters(without=["layers"])),
        algorithm=_make(methods.LOCAL_ALGORITHMS, local.algorithm),
        sgd=LocalSgd(local.momentum, local.weight_decay, local.clip_norm),
    )


def _make(table: Mapping[str, methods.Method], choice: Any) -> Any:
    return table[choice.type].build(**choice.parameters())
