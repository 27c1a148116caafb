"""From a config to what a run works on: the data, who holds what of it, and the initial model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedspec_dist import methods, seeding
from fedspec_dist.config import Config, expand_home
from fedspec_dist.data.partitions import Samples, class_counts
from fedspec_dist.data.prepared import Dataset, load
from fedspec_dist.models.network import Network

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Federation:
    """The data set and who holds what of it."""

    dataset: Dataset
    clients: Sequence[np.ndarray]  # client -> positions in the training set
    proxy: tuple[Tensor, Tensor] | None = None  # images, labels: the server's own, taken out of the test set

    def to(self, device: torch.device) -> Federation:
        """The same on a device."""
        proxy = self.proxy
        if proxy is not None:
            proxy = proxy[0].to(device, memory_format=torch.channels_last), proxy[1].to(device)
        return Federation(self.dataset.to(device), self.clients, proxy)

    @property
    def population(self) -> list[int]:
        """Clients with data; one without cannot train and never takes part."""
        return [client for client, samples in enumerate(self.clients) if len(samples)]

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Samples of each class at each client, int64 `[num_clients, num_classes]`."""
        return class_counts(self.dataset.train_labels.cpu().numpy(), self.clients, self.dataset.num_classes)

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
    ids = dataset.train_clients
    clients = methods.PARTITIONS[data.partition.type].build(
        Samples(dataset.train_labels.numpy(), None if ids is None else ids.numpy()),
        data.partition.clients,
        seeding.generator(config.seed, "partition"),
        **data.partition.parameters(without=["clients"]),
    )
    federation = _with_proxy(config, Federation(dataset, clients))
    empty = len(clients) - len(federation.population)
    if empty:
        log.info("%d of %d clients have no data and never take part", empty, len(clients))
    if config.cohort_size() > len(federation.population):
        raise ValueError(
            f"clients_per_round: got {config.cohort_size()}, but only {len(federation.population)} of "
            f"{len(clients)} clients have data; allowed: at most {len(federation.population)}"
        )
    return federation


def _with_proxy(config: Config, federation: Federation) -> Federation:
    """Some of the test samples become the server's own, if the weights of a phase are learned on such.

    They are gone from the test set in all phases, so that all are tested on the same samples.
    """
    shares = [getattr(phase.server.weights, "proxy_fraction", 0.0) for phase in config.schedule()]
    if not any(shares):
        return federation
    labels = federation.dataset.test_labels.numpy()
    positions = balanced_subset(labels, max(shares), seeding.generator(config.seed, "proxy"))
    if len(positions) == len(labels):
        raise ValueError(
            f"server.weights.proxy_fraction: got {max(shares)}, which takes all {len(labels)} test samples; "
            "allowed: a share that leaves some to test on"
        )
    dataset, *proxy = federation.dataset.hold_out(positions)
    log.info("%d of %d test samples are the server's own and not tested on", len(positions), len(labels))
    return Federation(dataset, federation.clients, (proxy[0], proxy[1]))


def balanced_subset(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Positions of about `share` of the samples, equally many of each class, at least one."""
    classes = np.unique(labels)
    quota = max(1, int(share * len(labels) / len(classes)))
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:quota] for label in classes]
    return np.sort(np.concatenate(chosen))


def build_model(config: Config, dataset: Dataset) -> Network:
    """The model with the initial parameters of the config's seed, on the CPU; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(config.seed, "model"))
        model: Network = methods.MODELS[config.model.type].build(
            dataset.input_shape, dataset.num_classes, **config.model.parameters(without=methods.MODEL_COMMON)
        )
        if config.model.projection is not None:
            model.add_projection(config.model.projection)
        return model
