"""A data set, and who holds what of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedspec_dist.config import Config
from fedspec_dist.core.buffers import moving_buffers
from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.data.partitions import class_counts
from fedspec_dist.rounds.making import trial

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Federation:
    """The data set and who holds what of it."""

    dataset: Dataset
    clients: Sequence[np.ndarray]  # client -> positions in the training set
    proxy: Examples | None = None  # the server's own, taken out of the test set
    attackers: tuple[int, ...] = ()  # the malicious clients, whose training labels are what they made of them
    # client -> its number among all clients that the data set has, where a partition takes some of those
    ids: Sequence[int] | None = None
    names: Sequence[str] | None = None  # client -> what the data call it
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
    require_enough(config, suited)
    return suited


def drops_single(config: Config, dataset: Dataset, module: nn.Module) -> bool:
    """Whether a batch of one sample is left out."""
    return config.model.buffers != "freeze" and bool(moving_buffers(module, trial(dataset)))


def require_enough(config: Config, federation: Federation) -> None:
    wanted, there = config.cohort_size(len(federation.clients)), len(federation.population)
    if wanted > there:
        raise ValueError(
            f"clients_per_round: got {wanted}, but only {there} of {len(federation.clients)} clients have data to "
            f"train on; allowed: at most {there}"
        )
