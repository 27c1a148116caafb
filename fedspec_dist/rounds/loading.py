"""From a config to the data that a run works on: loaded, cut into clients, and what is not for training put aside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspec_dist.clients.attacks import attackers
from fedspec_dist.config import Config, methods
from fedspec_dist.core import seeding
from fedspec_dist.core.draws import keyed
from fedspec_dist.data.dataset import Dataset
from fedspec_dist.data.partitions import Samples, target_bins
from fedspec_dist.data.prepared import load
from fedspec_dist.rounds.federation import Federation, require_enough
from fedspec_dist.rounds.making import make_attack, make_task
from fedspec_dist.rounds.proxy import balanced_subset, class_of, proxy_share, quota
from fedspec_dist.runs.identity import data_source
from fedspec_dist.runs.sources import module_digest

log = logging.getLogger(__name__)


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
    make_task(config, dataset)
    dataset = _suited(config, dataset)
    ids, groups = dataset.train.clients, dataset.train.groups
    with keyed(cpu, config.seed, "partition"):
        clients = methods.PARTITIONS[data.partition.type].build(
            Samples(
                None if groups is None else groups.numpy(), None if ids is None else ids.numpy(), len(dataset.train)
            ),
            data.partition.clients,
            seeding.generator(config.seed, "partition"),
            **data.partition.parameters(without=["clients"]),
        )
    _check_partition(data.partition.type, clients, data.partition.clients, len(dataset.train))
    federation = Federation(dataset, clients)
    if ids is not None and data.partition.type == "natural":
        federation = replace(federation, ids=_ids_used(clients, ids.numpy()))
        if called := dataset.facts.get("client_names"):
            federation = replace(federation, names=[called[int(ids[samples[0]])] for samples in clients])
        if dataset.test.clients is not None:
            federation = replace(federation, tests=_own_tests(clients, ids.numpy(), dataset.test.clients.numpy()))
    federation = _with_attackers(config, _with_proxy(config, _with_validation(config, federation)))
    if "clients" in config.eval.on and federation.tests is None and federation.validation is None:
        raise ValueError(
            "eval.on: got clients, whose own test samples the data set does not name; allowed: a data set that does, "
            "with data.partition: natural, or data.holdout above 0, which keeps some of each client's samples for it"
        )
    _say_what_is_used(config, federation)
    require_enough(config, federation)
    return federation


def _suited(config: Config, dataset: Dataset) -> Dataset:
    """In the precision of the run, with groups by the target where those are asked for."""
    if config.data.augment and not dataset.are_images:
        raise ValueError(
            f"data.augment: got {', '.join(entry.type for entry in config.data.augment)}, which change images; "
            f"{config.data.dataset.type} has none; allowed with it: []"
        )
    if config.data.bins is not None:
        if dataset.train.groups is not None:
            raise ValueError(
                f"data.bins: got {config.data.bins}, but the samples of {config.data.dataset.type} have classes or "
                "groups of their own; allowed with them: null"
            )
        if dataset.train.targets is None or dataset.test.targets is None:
            raise ValueError(f"data.bins: got {config.data.bins}, but the samples have no targets; allowed: null")
        bins = target_bins(dataset.train.targets.numpy(), config.data.bins)
        train, test = (
            replace(split, groups=torch.from_numpy(bins(split.targets.numpy())))
            for split in (dataset.train, dataset.test)
            if split.targets is not None
        )
        dataset = replace(dataset, train=train, test=test, num_groups=config.data.bins)
    # Arrays of one's own may be in another: numpy's are float64 unless asked otherwise.
    return dataset.astype(torch.float64 if config.runtime.dtype == "float64" else torch.float32)


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


def _ids_used(clients: Sequence[np.ndarray], ids: np.ndarray) -> list[int] | None:
    """Whose samples each client has, of data with clients of its own; None where all of those take part."""
    used = [int(ids[samples[0]]) for samples in clients]
    return used if len(used) < len(np.unique(ids)) else None


def _own_tests(clients: Sequence[np.ndarray], ids: np.ndarray, test_ids: np.ndarray) -> list[np.ndarray]:
    """The positions in the test set of the samples of each client."""
    order = np.argsort(test_ids, kind="stable")
    owners = [int(ids[samples[0]]) for samples in clients]
    starts, stops = (np.searchsorted(test_ids[order], owners, side) for side in ("left", "right"))
    return [np.sort(order[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def _with_validation(config: Config, federation: Federation) -> Federation:
    """Some of each client's training samples become validation samples: never all of them."""
    share = config.data.holdout
    if not share:
        return federation
    training, validation = [], []
    for client, samples in enumerate(federation.clients):
        num = min(round(share * len(samples)), len(samples) - 1) if len(samples) else 0
        order = seeding.generator(config.seed, "holdout", client).permutation(samples)
        validation.append(np.sort(order[:num]))
        training.append(np.sort(order[num:]))
    if not any(map(len, validation)):
        raise ValueError(
            f"data.holdout: got {share}, of which no client has a whole sample (the largest has "
            f"{max(map(len, federation.clients))}); allowed: a larger one, or 0"
        )
    return replace(federation, clients=training, validation=validation)


def _with_proxy(config: Config, federation: Federation) -> Federation:
    """Some of the test samples become the server's own, if the weights of a phase are learned on such.

    They are gone from the test set in all phases, so that all are tested on the same samples.
    """
    share = max(proxy_share(phase) for phase in config.schedule())
    if not share:
        return federation
    test = federation.dataset.test
    labels = class_of(test)
    positions = balanced_subset(labels, quota(labels, share), seeding.generator(config.seed, "proxy"))
    if len(positions) == len(labels):
        raise ValueError(
            f"server.weights.proxy_fraction: got {share}, which takes all {len(labels)} test samples (at least one of "
            "each class); allowed: a share, and a test set, that leave some to test on"
        )
    log.info("%d of %d test samples are the server's own and not tested on", len(positions), len(labels))
    rest = np.setdiff1d(np.arange(len(labels)), positions)
    tests = federation.tests
    if tests is not None:
        tests = [np.searchsorted(rest, own[~np.isin(own, positions)]) for own in tests]
    return replace(
        federation,
        dataset=replace(federation.dataset, test=test.select(torch.from_numpy(rest))),
        proxy=test.select(torch.from_numpy(positions)),
        tests=tests,
    )


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
    log.info("%d of %d clients are malicious: %s", len(malicious), len(federation.population), choice.type)
    federation = replace(federation, attackers=malicious)
    if dataset.train.targets is None or not dataset.num_groups:
        return federation  # there are no labels that could be false; config refuses an attack on them
    targets = dataset.train.targets.clone()
    own = torch.from_numpy(np.concatenate([federation.clients[client] for client in malicious]))
    with keyed(torch.device("cpu"), config.seed, "attack"):
        targets[own] = make_attack(config).labels(targets[own], dataset.num_outputs)
    groups = targets if dataset.train.groups is dataset.train.targets else dataset.train.groups
    train = replace(dataset.train, targets=targets, groups=groups)
    return replace(federation, dataset=replace(dataset, train=train))


def _say_what_is_used(config: Config, federation: Federation) -> None:
    """On the log, what who looks at the result may not expect: clients, samples or classes that are not there."""
    dataset, num_clients = federation.dataset, len(federation.clients)
    empty = num_clients - len(federation.population)
    if empty:
        log.info("%d of %d clients have no data and never take part", empty, num_clients)
    held = sum(map(len, (*federation.clients, *(federation.validation or ()))))
    there = len(dataset.train)
    if federation.ids is not None:
        log.warning(
            "data.partition.clients: %d of the %d clients of the data set take part, with %d of its %d samples; "
            "data.partition.clients=null takes all. Which they are, in the order of their ids: %s",
            num_clients,
            len(dataset.train.clients.unique()) if dataset.train.clients is not None else 0,
            held,
            there,
            ", ".join(map(str, federation.ids[:20])) + (", ..." if num_clients > 20 else ""),
        )
    elif held < there:
        log.info("%d of %d training samples belong to no client", there - held, there)
    if dataset.train.groups is None:
        return
    present = dataset.train.groups.unique()
    if len(present) < dataset.num_groups:
        remedy = "; data.renumber=true numbers those that do" if hasattr(config.data.dataset, "renumber") else ""
        log.warning(
            "%d of %d classes occur in the training samples (labels %d to %d)%s",
            len(present),
            dataset.num_groups,
            int(present.min()),
            int(present.max()),
            remedy,
        )
