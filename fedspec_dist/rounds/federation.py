"""From a config to what a run works on: the data, who holds what of it, and the initial model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspec_dist import methods, seeding
from fedspec_dist.clients.attacks import Attack, attackers
from fedspec_dist.config import Config, Phase, expand_home
from fedspec_dist.data.partitions import Samples, class_counts
from fedspec_dist.data.prepared import Dataset, images_to, load
from fedspec_dist.draws import keyed
from fedspec_dist.models.network import Network

log = logging.getLogger(__name__)

# The share of the test set for a weighting that is learned on such samples and has no parameter for it.
_DEFAULT_PROXY = 0.02


@dataclass(frozen=True)
class Federation:
    """The data set and who holds what of it."""

    dataset: Dataset
    clients: Sequence[np.ndarray]  # client -> positions in the training set
    proxy: tuple[Tensor, Tensor] | None = None  # images, labels: the server's own, taken out of the test set
    attackers: tuple[int, ...] = ()  # the malicious clients, whose training labels are what they made of them

    def to(self, device: torch.device, image_format: torch.memory_format = torch.channels_last) -> Federation:
        """The same on a device."""
        proxy = self.proxy
        if proxy is not None:
            proxy = images_to(proxy[0], device, image_format), proxy[1].to(device)
        return replace(self, dataset=self.dataset.to(device, image_format), proxy=proxy)

    @property
    def population(self) -> list[int]:
        """Clients with data; one without cannot train and never takes part."""
        return [client for client, samples in enumerate(self.clients) if len(samples)]

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Samples of each class at each client, int64 `[num_clients, num_classes]`."""
        return class_counts(self.dataset.train_labels.cpu().numpy(), self.clients, self.dataset.num_classes)

    @cached_property
    def test_class_counts(self) -> Tensor:
        """Samples of each class that the model is tested on, int64 `[num_classes]`, on the CPU."""
        return self.dataset.test_labels.cpu().bincount(minlength=self.dataset.num_classes)

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
    cpu = torch.device("cpu")
    with keyed(cpu, config.seed, "data"):
        dataset = load(data.dataset.type, source, root, prepares=prepares, embedded=source.embedded)
    ids = dataset.train_clients
    with keyed(cpu, config.seed, "partition"):
        clients = methods.PARTITIONS[data.partition.type].build(
            Samples(dataset.train_labels.numpy(), None if ids is None else ids.numpy()),
            data.partition.clients,
            seeding.generator(config.seed, "partition"),
            **data.partition.parameters(without=["clients"]),
        )
    _check_partition(data.partition.type, clients, data.partition.clients, len(dataset.train_labels))
    federation = _with_attackers(config, _with_proxy(config, Federation(dataset, clients)))
    empty = len(clients) - len(federation.population)
    if empty:
        log.info("%d of %d clients have no data and never take part", empty, len(clients))
    if config.cohort_size() > len(federation.population):
        raise ValueError(
            f"clients_per_round: got {config.cohort_size()}, but only {len(federation.population)} of "
            f"{len(clients)} clients have data; allowed: at most {len(federation.population)}"
        )
    return federation


def _check_partition(name: str, clients: Any, num_clients: int, num_samples: int) -> None:
    """Ours hold this by themselves; a plugin's may not."""
    sound = len(clients) == num_clients and all(
        isinstance(c, np.ndarray) and c.ndim == 1 and np.issubdtype(c.dtype, np.integer) for c in clients
    )
    together = np.concatenate(clients) if sound and num_clients else np.zeros(0, dtype=np.int64)
    inside = not len(together) or (together.min() >= 0 and together.max() < num_samples)
    if not sound or not inside or len(np.unique(together)) < len(together):
        raise ValueError(
            f"data.partition: {name} did not give {num_clients} one-dimensional arrays of positions from 0 to "
            f"{num_samples - 1}, none of them twice"
        )


def _with_proxy(config: Config, federation: Federation) -> Federation:
    """Some of the test samples become the server's own, if the weights of a phase are learned on such.

    They are gone from the test set in all phases, so that all are tested on the same samples.
    """
    share = max(proxy_share(phase) for phase in config.schedule())
    if not share:
        return federation
    labels = federation.dataset.test_labels.numpy()
    positions = balanced_subset(labels, quota(labels, share), seeding.generator(config.seed, "proxy"))
    if len(positions) == len(labels):
        raise ValueError(
            f"server.weights.proxy_fraction: got {share}, which takes all {len(labels)} test samples (at least one of "
            "each class); allowed: a share, and a test set, that leave some to test on"
        )
    dataset, *proxy = federation.dataset.hold_out(positions)
    log.info("%d of %d test samples are the server's own and not tested on", len(positions), len(labels))
    return replace(federation, dataset=dataset, proxy=(proxy[0], proxy[1]))


def _with_attackers(config: Config, federation: Federation) -> Federation:
    """Some of the clients are malicious, if the config has an attack: the same ones in all phases.

    Raises:
        ValueError: the fraction of them is less than one client.
    """
    choice, dataset = config.clients.attack, federation.dataset
    if choice.type == "none":
        return federation
    malicious = attackers(config.seed, choice.fraction, federation.population)
    if not malicious:
        raise ValueError(
            f"clients.attack.fraction: got {choice.fraction}, which of {len(federation.population)} clients with data "
            "is less than one; allowed: a larger one, or clients.attack: none"
        )
    labels = dataset.train_labels.clone()
    own = torch.from_numpy(np.concatenate([federation.clients[client] for client in malicious]))
    labels[own] = make_attack(config).labels(labels[own], dataset.num_classes)
    log.info("%d of %d clients are malicious: %s", len(malicious), len(federation.population), choice.type)
    return replace(federation, dataset=replace(dataset, train_labels=labels), attackers=malicious)


def make_attack(config: Config) -> Attack:
    choice = config.clients.attack
    made: Attack = methods.ATTACKS[choice.type].build(**choice.parameters(without=methods.ATTACK_COMMON))
    return made


def proxy_share(phase: Phase) -> float:
    """Of the test samples, how many the weights of a phase are learned on; 0 if they are not learned on such."""
    needed = methods.WEIGHTS[phase.server.weights.type].load().needs_proxy
    return float(getattr(phase.server.weights, "proxy_fraction", _DEFAULT_PROXY)) if needed else 0.0


def quota(labels: np.ndarray, share: float) -> int:
    """Samples of each class in about `share` of them all, at least one."""
    return max(1, int(share * len(labels) / len(np.unique(labels))))


def balanced_subset(labels: np.ndarray, per_class: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Positions of so many samples of each class, or of all there are: the first ones, or random ones."""
    places = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return np.sort(np.concatenate([(rng.permutation(p) if rng else p)[:per_class] for p in places]))


def build_model(config: Config, dataset: Dataset) -> Network:
    """The model with the initial parameters of the config's seed, on the CPU; the global generators are left alone."""
    with keyed(torch.device("cpu"), config.seed, "model"):
        model: Network = methods.MODELS[config.model.type].build(
            dataset.input_shape, dataset.num_classes, **config.model.parameters(without=methods.MODEL_COMMON)
        )
        if config.model.projection is not None:
            if not isinstance(model, Network):
                raise ValueError(
                    f"model.projection: {config.model.type} is no fedspec_dist.models.network.Network, to which a "
                    "projection head can be added; allowed: null"
                )
            model.add_projection(config.model.projection)
        return model
