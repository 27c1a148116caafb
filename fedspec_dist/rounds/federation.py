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

from fedspec_dist.clients.attacks import Attack, attackers
from fedspec_dist.config import Config, Phase, methods
from fedspec_dist.core import seeding
from fedspec_dist.core.draws import keyed
from fedspec_dist.data.partitions import Samples, class_counts
from fedspec_dist.data.prepared import Dataset, images_to, load
from fedspec_dist.models.network import Network
from fedspec_dist.rounds.model_check import check_model
from fedspec_dist.runs.identity import data_source
from fedspec_dist.runs.sources import module_digest

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
    # client -> its number among all clients that the data set has, where a partition takes some of those
    ids: Sequence[int] | None = None

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


def load_federation(config: Config, prepares: bool, content: str = "") -> Federation:
    """The data on the CPU, and its partition; `content` is the data's digest where it is known.

    Raises:
        ValueError: the data set is missing or unsound, or cannot be cut as asked.
    """
    data = config.data
    source = data_source(config)
    module = methods.DATASETS[data.dataset.type].target.partition(":")[0]
    cpu = torch.device("cpu")
    with keyed(cpu, config.seed, "data"):
        dataset = load(
            data.dataset.type,
            source,
            Path(data.root),
            prepares=prepares,
            embedded=source.embedded,
            content=content,
            reader="" if module.startswith(".") else module_digest(module),
        )
    ids, labels = dataset.train_clients, dataset.train_labels.numpy()
    with keyed(cpu, config.seed, "partition"):
        clients = methods.PARTITIONS[data.partition.type].build(
            Samples(labels, None if ids is None else ids.numpy()),
            data.partition.clients,
            seeding.generator(config.seed, "partition"),
            **data.partition.parameters(without=["clients"]),
        )
    _check_partition(data.partition.type, clients, data.partition.clients, len(labels))
    used = _ids_used(clients, ids.numpy()) if ids is not None and data.partition.type == "natural" else None
    federation = _with_attackers(config, _with_proxy(config, Federation(dataset, clients, ids=used)))
    _say_what_is_used(config, federation)
    if config.cohort_size(len(clients)) > len(federation.population):
        raise ValueError(
            f"clients_per_round: got {config.cohort_size(len(clients))}, but only {len(federation.population)} of "
            f"{len(clients)} clients have data; allowed: at most {len(federation.population)}"
        )
    return federation


def _ids_used(clients: Sequence[np.ndarray], ids: np.ndarray) -> list[int] | None:
    """Whose samples each client has, of data with clients of its own; None where all of those take part."""
    used = [int(ids[samples[0]]) for samples in clients]
    return used if len(used) < len(np.unique(ids)) else None


def _say_what_is_used(config: Config, federation: Federation) -> None:
    """On the log, what who looks at the result may not expect: clients, samples or classes that are not there."""
    dataset, num_clients = federation.dataset, len(federation.clients)
    empty = num_clients - len(federation.population)
    if empty:
        log.info("%d of %d clients have no data and never take part", empty, num_clients)
    held, there = sum(map(len, federation.clients)), len(dataset.train_labels)
    if federation.ids is not None:
        log.warning(
            "data.partition.clients: %d of the %d clients of the data set take part, with %d of its %d samples; "
            "data.partition.clients=null takes all. Which they are, in the order of their ids: %s",
            num_clients,
            len(dataset.train_clients.unique()) if dataset.train_clients is not None else 0,
            held,
            there,
            ", ".join(map(str, federation.ids[:20])) + (", ..." if num_clients > 20 else ""),
        )
    elif held < there:
        log.info("%d of %d training samples belong to no client", there - held, there)
    present = dataset.train_labels.unique()
    if len(present) < dataset.num_classes:
        remedy = "; data.renumber=true numbers those that do" if hasattr(config.data.dataset, "renumber") else ""
        log.warning(
            "%d of %d classes occur in the training samples (labels %d to %d)%s",
            len(present),
            dataset.num_classes,
            int(present.min()),
            int(present.max()),
            remedy,
        )


def _check_partition(name: str, clients: Any, num_clients: int | None, num_samples: int) -> None:
    """Ours hold this by themselves; a plugin's may not."""
    clients = list(clients) if isinstance(clients, (list, tuple)) else []
    num_clients = len(clients) if num_clients is None else num_clients
    sound = 0 < len(clients) == num_clients and all(
        isinstance(c, np.ndarray) and c.ndim == 1 and np.issubdtype(c.dtype, np.integer) for c in clients
    )
    together = np.concatenate(clients) if sound else np.zeros(0, dtype=np.int64)
    inside = not len(together) or (together.min() >= 0 and together.max() < num_samples)
    if not sound or not inside or len(np.unique(together)) < len(together):
        raise ValueError(
            f"data.partition: {name} did not give {num_clients} one-dimensional arrays of positions from 0 "
            f"to {num_samples - 1}, none of them twice"
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
    with keyed(torch.device("cpu"), config.seed, "attack"):
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
        _refuse_too_large(config, dataset)
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
        check_model(config, model, dataset)
        return model


def _refuse_too_large(config: Config, dataset: Dataset) -> None:
    """Before any memory is asked for: the model is made once without storage, where it can be.

    Raises:
        ValueError: it has more parameters than a vector of them can have.
    """
    parameters = config.model.parameters(without=methods.MODEL_COMMON)
    try:
        with torch.device("meta"):
            model = methods.MODELS[config.model.type].build(dataset.input_shape, dataset.num_classes, **parameters)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
    except Exception:  # a plugin's may not be made so; what is wrong with any is told when it is made in earnest
        return
    if num_parameters > methods.MAX_PARAMETERS:
        raise ValueError(
            f"model: {config.model.type} would have {num_parameters:,} parameters for images of shape "
            f"{list(dataset.input_shape)}; allowed: at most {methods.MAX_PARAMETERS:,}"
        )
