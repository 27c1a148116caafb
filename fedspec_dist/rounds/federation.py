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
from torch import Tensor, nn

from fedspec_dist.clients.attacks import Attack, attackers
from fedspec_dist.config import Config, Phase, expand_home, methods
from fedspec_dist.core import seeding
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.buffers import moving_buffers
from fedspec_dist.core.draws import keyed
from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.data.partitions import Samples, class_counts, target_bins
from fedspec_dist.data.prepared import load
from fedspec_dist.models.network import Network
from fedspec_dist.rounds.model_check import check_model
from fedspec_dist.runs.identity import data_source
from fedspec_dist.runs.sources import module_digest
from fedspec_dist.tasks.base import Task

log = logging.getLogger(__name__)

# The share of the test set for a weighting that is learned on such samples and has no parameter for it.
_DEFAULT_PROXY = 0.02


@dataclass(frozen=True)
class Federation:
    """The data set and who holds what of it."""

    dataset: Dataset
    clients: Sequence[np.ndarray]  # client -> positions in the training set
    proxy: Examples | None = None  # the server's own, taken out of the test set
    attackers: tuple[int, ...] = ()  # the malicious clients, whose training labels are what they made of them
    # client -> its number among all clients that the data set has, where a partition takes some of those
    ids: Sequence[int] | None = None
    validation: Sequence[np.ndarray] | None = None  # client -> positions in the training set, held out of `clients`
    tests: Sequence[np.ndarray] | None = None  # client -> positions of its own samples in the test set, if it has such
    min_samples: int = 1  # with fewer, a client cannot train

    def to(self, device: torch.device, image_format: torch.memory_format = torch.channels_last) -> Federation:
        """The same on a device."""
        proxy = self.proxy
        if proxy is not None:
            proxy = replace(self.dataset, train=proxy, test=proxy).to(device, image_format).test
        return replace(self, dataset=self.dataset.to(device, image_format), proxy=proxy)

    @cached_property
    def population(self) -> list[int]:
        """Clients with data; one without cannot train and never takes part."""
        return [client for client, samples in enumerate(self.clients) if len(samples) >= self.min_samples]

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Samples of each class at each client, int64 `[num_clients, num_groups]`; of no class where there are none."""
        groups = self.dataset.train.groups
        if groups is None:
            return np.zeros((len(self.clients), 0), dtype=np.int64)
        return class_counts(groups.numpy(), self.clients, self.dataset.num_groups)

    @cached_property
    def test_class_counts(self) -> Tensor | None:
        """Samples of each class that the model is tested on, int64 `[num_groups]`, on the CPU."""
        groups = self.dataset.test.groups
        return None if groups is None else groups.bincount(minlength=self.dataset.num_groups)

    @cached_property
    def held_out(self) -> Examples | None:
        """All validation samples, client by client."""
        if self.validation is None:
            return None
        return self.dataset.train.select(torch.from_numpy(np.concatenate(list(self.validation))))

    @cached_property
    def own_samples(self) -> tuple[Examples, list[Tensor]]:
        """What each client is evaluated on: its test samples if the data set names such, else its validation samples.

        The samples, and for each client its positions among them, on their device.
        """
        examples, owned = (
            (self.dataset.train, self.validation) if self.tests is None else (self.dataset.test, self.tests)
        )
        device = examples.inputs[0].device
        return examples, [torch.from_numpy(positions).to(device) for positions in owned or ()]

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
        if dataset.test.clients is not None:
            federation = replace(federation, tests=_own_tests(clients, ids.numpy(), dataset.test.clients.numpy()))
    federation = _with_attackers(config, _with_proxy(config, _with_validation(config, federation)))
    if "clients" in config.eval.on and federation.tests is None and federation.validation is None:
        raise ValueError(
            "eval.on: got clients, whose own test samples the data set does not name; allowed: a data set that does, "
            "with data.partition: natural, or data.holdout above 0, which keeps some of each client's samples for it"
        )
    _say_what_is_used(config, federation)
    _require_enough(config, federation)
    return federation


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


def _own_tests(clients: Sequence[np.ndarray], ids: np.ndarray, test_ids: np.ndarray) -> list[np.ndarray]:
    """The positions in the test set of the samples of each client."""
    order = np.argsort(test_ids, kind="stable")
    owners = [int(ids[samples[0]]) for samples in clients]
    starts, stops = (np.searchsorted(test_ids[order], owners, side) for side in ("left", "right"))
    return [np.sort(order[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def suit(config: Config, federation: Federation, module: nn.Module) -> Federation:
    """Without the clients that cannot train this model: a norm over the batch needs two samples.

    Raises:
        ValueError: too few are left, or no batch may have two.
    """
    if not drops_single(config, federation.dataset, module):
        return federation
    if config.local.batch_size == 1:
        raise ValueError(
            f"local.batch_size: got 1 with model {config.model.type}, which normalises over the batch; allowed with "
            "it: at least 2, a model with another norm, or model.buffers: freeze"
        )
    suited = replace(federation, min_samples=2)
    lost = len(federation.population) - len(suited.population)
    if lost:
        log.warning("%d clients with a single sample never take part: the model normalises over the batch", lost)
    _require_enough(config, suited)
    return suited


def drops_single(config: Config, dataset: Dataset, module: nn.Module) -> bool:
    """Whether a batch of one sample is left out."""
    return config.model.buffers != "freeze" and bool(moving_buffers(module, trial(dataset)))


def trial(dataset: Dataset) -> Batch:
    """Two samples, the least that a norm over the batch takes."""
    if len(dataset.train) > 1:
        return dataset.train.block(0, 2)
    return dataset.train.batch(torch.arange(2, device=dataset.train.inputs[0].device) % len(dataset.train))


def _require_enough(config: Config, federation: Federation) -> None:
    wanted, there = config.cohort_size(len(federation.clients)), len(federation.population)
    if wanted > there:
        raise ValueError(
            f"clients_per_round: got {wanted}, but only {there} of {len(federation.clients)} clients have data to "
            f"train on; allowed: at most {there}"
        )


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


def make_attack(config: Config) -> Attack:
    choice = config.clients.attack
    made: Attack = methods.ATTACKS[choice.type].build(**choice.parameters(without=methods.ATTACK_COMMON))
    return made


def proxy_share(phase: Phase) -> float:
    """Of the test samples, how many the weights of a phase are learned on; 0 if they are not learned on such."""
    needed = "proxy" in methods.WEIGHTS[phase.server.weights.type].all_needs()
    return float(getattr(phase.server.weights, "proxy_fraction", _DEFAULT_PROXY)) if needed else 0.0


def class_of(examples: Examples) -> np.ndarray:
    """Of each sample, int64 `[n]`; where there are no classes, all are of one."""
    return np.zeros(len(examples), dtype=np.int64) if examples.groups is None else examples.groups.numpy()


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
