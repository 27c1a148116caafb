"""Which clients take part in a round, and what each of them will do: functions of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedspec_dist import seeding
from fedspec_dist.clients.sequential import ClientWork
from fedspec_dist.data.augment import Augmentation
from fedspec_dist.data.batches import batch_bounds, epoch_orders


def sample_cohort(seed: int, round_index: int, population: Sequence[int], size: int) -> list[int]:
    """`size` different clients of the population, uniformly, in ascending order.

    Raises:
        ValueError: more clients than the population has.
    """
    if size > len(population):
        raise ValueError(
            f"clients_per_round: got {size}, but only {len(population)} clients have data; "
            f"allowed: at most {len(population)}"
        )
    chosen = seeding.generator(seed, "cohort", round_index).choice(len(population), size, replace=False)
    return sorted(int(population[position]) for position in chosen)


def client_work(
    seed: int,
    round_index: int,
    client: int,
    samples: np.ndarray,  # [n] positions in the training set
    epochs: int,
    batch_size: int,
    augmentation: Augmentation,
    device: torch.device,
) -> ClientWork:
    """The batches and augmentation draws of a client in a round."""
    order = samples[epoch_orders(seeding.generator(seed, "batches", round_index, client), len(samples), epochs)]
    draws = None
    if not augmentation.does_nothing:
        draws = augmentation.draw(seeding.generator(seed, "augment", round_index, client), len(order))
    return ClientWork(
        order=_send(torch.from_numpy(order), device),
        bounds=batch_bounds(len(samples), batch_size, epochs),
        draws=None if draws is None else _send(draws, device),
    )


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: a GPU copies on its own only from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
