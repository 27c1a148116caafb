"""FedAvg as one would write it without a framework: the floor that the package is measured against.

Nothing of `fedspec_dist` is used here. Which process trains which clients on which batches comes from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class PlainClient:
    """A client's work in a round."""

    batches: Sequence[Tensor]  # positions in the training set, int64, one tensor a local step
    weight: float  # n_k / sum_j n_j over the cohort


class PlainLoop:
    """`nn.Module`, `torch.optim.SGD`, `zero_grad`, `backward`, `step`; one all_reduce a round averages the clients.

    Args:
        module: copied; `parameters` is the global model.
        images: `[n, C, H, W]`; its memory format is the one that batches have.
        labels: int64 `[n]`.
    """

    def __init__(self, module: nn.Module, images: Tensor, labels: Tensor, lr: float, weight_decay: float) -> None:
        self.module = deepcopy(module)
        self.images, self.labels = images, labels
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=lr, weight_decay=weight_decay)
        self.parameters = [parameter.detach().clone() for parameter in self.module.parameters()]

    def round(self, clients: Sequence[PlainClient]) -> None:
        """Train this process's clients from the global model, then move it by everybody's weighted updates."""
        totals = [torch.zeros_like(parameter) for parameter in self.parameters]
        for client in clients:
            self._train(client.batches)
            with torch.no_grad():
                for total, local, start in zip(totals, self.module.parameters(), self.parameters, strict=True):
                    total.add_(local - start, alpha=client.weight)
        flat = torch.cat([total.reshape(-1) for total in totals])
        if dist.is_initialized():
            dist.all_reduce(flat)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, update in zip(self.parameters, flat.split(sizes), strict=True):
            parameter.add_(update.view_as(parameter))

    def start_from(self, parameters: Iterable[Tensor]) -> None:
        """Begin the next round with this global model."""
        with torch.no_grad():
            for mine, given in zip(self.parameters, parameters, strict=True):
                mine.copy_(given)

    def _train(self, batches: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for local, start in zip(self.module.parameters(), self.parameters, strict=True):
                local.copy_(start)
        for index in batches:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.module(self.images[index]), self.labels[index])
            loss.backward()
            self.optimizer.step()
