"""A plugin whose local method draws from `client.generator()` in its loss, and keeps something of each client."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client
from fedspec_dist.clients.algorithms.controls import Scaffold
from fedspec_dist.config.methods import register


class Noisy(Scaffold):
    """Draws of the client's own, and numbers that are."""

    def __init__(self) -> None:
        super().__init__(option=2)

    def loss(self, model, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        drawn = torch.randn(3, generator=client.generator("noise"), dtype=torch.float64)
        noise = drawn.float() * (client.id + 1 + client.round_index) * (1 if client.is_new else 2) / client.num_steps
        return client.task_loss(model(inputs) + noise.to(inputs.device), labels)


register(
    "local.algorithm", "noisy_scaffold", "tests.clients.noisy_method:Noisy", traits={"server_half", "counts_steps"}
)
