"""Federated training as one would write it down: modules, optimizers, dictionaries. Nothing of the package is used.

What is drawn follows the rule of docs/reproducibility.md: numpy's PCG64 from `(seed, crc32 of the purpose, key)`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SEED = 0
State = dict[str, Tensor]


def draws(purpose: str, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([SEED, zlib.crc32(purpose.encode()), *key])))


def any_of(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch(name, glob) for glob in globs)


@dataclass
class PlainFederation:
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    owners: np.ndarray  # whose each sample is
    # inputs, targets, and whose each is; None: what `holdout` takes of the clients' own samples
    tests: tuple[Tensor, Tensor, np.ndarray] | None
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    cohort_size: int = 2
    batch_size: int = 4
    holdout: float = 0.0
    drop_last: bool | None = None  # None: a batch of one sample that batch norm would be trained on
    buffers: str = "aggregate"
    shared: Sequence[str] = ("*",)
    keep: Sequence[str] = ()
    schedule: Sequence[tuple[int, Sequence[str]]] = ((2, ("*",)),)  # epochs, and what trains in them
    kept: dict[int, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients = [np.flatnonzero(self.owners == owner) for owner in np.unique(self.owners)]
        self.held_out = []
        for k, own in enumerate(self.clients):
            num, order = min(round(self.holdout * len(own)), len(own) - 1), draws("holdout", k).permutation(own)
            self.held_out.append(np.sort(order[:num]))
            self.clients[k] = np.sort(order[num:])
        self.normalises = any(isinstance(part, nn.BatchNorm2d) for part in self.model.modules())

    def round(self, index: int) -> None:
        able = [k for k, own in enumerate(self.clients) if len(own) > 1 or not self._trains_norms()]
        chosen = draws("cohort", index).choice(len(able), self.cohort_size, replace=False)
        cohort = sorted(able[place] for place in chosen)
        models = {k: self._trained(index, k) for k in cohort}
        total = sum(len(self.clients[k]) for k in cohort)
        averaged = {name for name, _ in self.model.named_parameters() if any_of(name, self.shared)}
        if self.buffers == "aggregate":
            averaged |= {name for name, value in self.model.named_buffers() if value.is_floating_point()}
        state = self.model.state_dict()
        for name in averaged:
            state[name].copy_(sum(len(self.clients[k]) / total * models[k].state_dict()[name] for k in cohort))
        for k, model in models.items():
            own = {name: value for name, value in model.named_parameters() if any_of(name, self.keep)}
            own |= dict(model.named_buffers()) if self.buffers == "local" else {}
            self.kept[k] = {name: value.detach().clone() for name, value in own.items()}

    def evaluated(self) -> dict[int, float]:
        """Client -> the loss on its own samples, of the global model with what it keeps."""
        inputs, targets, places = self.inputs, self.targets, self.held_out
        if self.tests is not None:
            inputs, targets, owners = self.tests
            places = [np.flatnonzero(owners == owner) for owner in np.unique(self.owners)]
        found = {}
        for k, own in enumerate(map(torch.from_numpy, places)):
            if len(own):
                found[k] = float(self.loss(self._own(k).eval()(inputs[own]), targets[own]).detach())
        return found

    def _own(self, client: int) -> nn.Module:
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.kept.get(client, {}), strict=False)
        return model

    def _drops(self, size: int, alone: bool) -> bool:
        if self.drop_last is None:
            return size == 1 and self._trains_norms()
        return self.drop_last and size < self.batch_size and not alone

    def _trains_norms(self) -> bool:
        return self.normalises and self.buffers != "freeze"

    def _trained(self, index: int, client: int) -> nn.Module:
        model = self._own(client).train()
        if self.buffers == "freeze":
            for part in model.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.eval()
        optimizer = self.optimizer(model.parameters())
        own, order = self.clients[client], draws("batches", index, client)
        for epochs, trained in self.schedule:
            for _ in range(epochs):
                places = own[order.permutation(len(own))]
                for start in range(0, len(own), self.batch_size):
                    batch = torch.from_numpy(places[start : start + self.batch_size])
                    if self._drops(len(batch), alone=start == 0):
                        continue
                    optimizer.zero_grad()
                    self.loss(model(self.inputs[batch]), self.targets[batch]).backward()
                    for name, parameter in model.named_parameters():
                        if not any_of(name, trained):
                            parameter.grad = None
                    optimizer.step()
        return model
