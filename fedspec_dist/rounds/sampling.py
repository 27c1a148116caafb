"""Which clients take part in a round, and what each of them will do: functions of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.clients.executors.base import ClientWork, Ranges
from fedspec_dist.config import Config, Local, Range
from fedspec_dist.core import seeding
from fedspec_dist.data.images.augment import Augmentation

_EMPTY_DRAWS = 1000


def sample_cohort(config: Config, round_index: int, population: Sequence[int]) -> list[int]:
    """The clients that are asked to take part in a round, in ascending order; at least one."""
    if config.sampling == "bernoulli":
        return _bernoulli(config.seed, round_index, population, config.mean_cohort(len(population)) / len(population))
    return _fixed(config.seed, round_index, population, config.cohort_size(len(population)))


def reporting(config: Config, round_index: int, sampled: Sequence[int]) -> list[int]:
    """Those that will report: each fails to with probability `dropout`, and then it is as if it had not been asked."""
    if not config.dropout:
        return list(sampled)

    def drops_out(client: int) -> bool:
        return seeding.generator(config.seed, "dropout", round_index, client).random() < config.dropout

    return [client for client in sampled if not drops_out(client)]


def _fixed(seed: int, round_index: int, population: Sequence[int], size: int) -> list[int]:
    """`size` different clients, uniformly.

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


def _bernoulli(seed: int, round_index: int, population: Sequence[int], share: float) -> list[int]:
    """Each client by itself with probability `share`; drawn again while nobody is in.

    Of a share so small that all draws are empty, what is left is one client, each as likely.
    """
    draws = seeding.generator(seed, "cohort", round_index)
    for _ in range(_EMPTY_DRAWS):
        chosen = [client for client, u in zip(population, draws.random(len(population)), strict=True) if u <= share]
        if chosen:
            return chosen
    return [int(draws.choice(np.array(population)))]


@dataclass(frozen=True)
class Workload:
    """A client's local work in a round: the batches of `epochs` epochs, up to `num_steps` of them."""

    num_samples: int  # that it has
    epochs: int
    num_steps: int
    bounds: Sequence[tuple[int, int]]
    stints: Sequence[int] | None = None  # of each batch, which entry of `local.schedule` it belongs to

    @property
    def samples_seen(self) -> int:
        return self.bounds[-1][1] if self.bounds else 0  # with those of dropped batches in between


def workload(
    seed: int, local: Local, round_index: int, client: int, num_samples: int, drops_single: bool = False
) -> Workload:
    """From `local.schedule` if given, from `local.steps`, else from `local.epochs`; a range is drawn from uniformly.

    `drops_single`: a batch of one sample is left out, unless `local.drop_last` says otherwise.
    """
    key = (seed, "work", round_index, client)
    batches = _kept_batches(local, num_samples, drops_single)
    if local.schedule:
        epochs = sum(stint.epochs for stint in local.schedule)
        num_steps = epochs * len(batches)
    elif local.steps is not None:
        num_steps = _draw(local.steps, *key)
        epochs = -(-num_steps // len(batches))
    else:
        epochs = _draw(local.epochs, *key)
        num_steps = epochs * len(batches)
    bounds = [
        (start + epoch * num_samples, stop + epoch * num_samples) for epoch in range(epochs) for start, stop in batches
    ]
    stints = None
    if local.schedule:
        stints = [n for n, stint in enumerate(local.schedule) for _ in range(stint.epochs * len(batches))]
    return Workload(num_samples, epochs, num_steps, bounds[:num_steps], stints)


def _kept_batches(local: Local, num_samples: int, drops_single: bool) -> list[tuple[int, int]]:
    """Start and stop of the batches of one epoch, of which the last may be left out."""
    batches = batch_bounds(num_samples, local.batch_size, 1)
    size = batches[-1][1] - batches[-1][0] if batches else 0
    dropped = size < local.batch_size if local.drop_last is True else drops_single and size == 1
    return batches[:-1] if local.drop_last is not False and dropped and len(batches) > 1 else batches


def _draw(amount: int | Range, seed: int, purpose: str, *key: int) -> int:
    if isinstance(amount, int):
        return amount
    return int(seeding.generator(seed, purpose, *key).integers(amount.min, amount.max + 1))


def client_work(
    seed: int,
    round_index: int,
    client: int,
    samples: np.ndarray,  # [n] positions in the training set
    class_counts: np.ndarray,  # [C]
    load: Workload,
    augmentation: Augmentation,
    device: torch.device,
    state: Tensor | None = None,  # what it kept
    stint_ranges: Sequence[Ranges] = (),  # of each entry of `local.schedule`
) -> ClientWork:
    """The batches, augmentation draws and seeds of a client in a round."""
    places = epoch_orders(seeding.generator(seed, "batches", round_index, client), len(samples), load.epochs)
    order = samples[places[: load.samples_seen]]
    draws = None
    if not augmentation.does_nothing:
        draws = augmentation.draw(seeding.generator(seed, "augment", round_index, client), len(order))
    return ClientWork(
        client=client,
        samples=send(torch.from_numpy(samples), device),
        order=send(torch.from_numpy(order), device),
        bounds=load.bounds,
        draws=None if draws is None else send(draws, device),
        class_counts=send(torch.from_numpy(class_counts), device),
        filter_seed=seeding.torch_seed(seed, "filter", round_index, client),
        state=None if state is None else send(state, device),
        ranges=None if load.stints is None else [stint_ranges[number] for number in load.stints],
    )


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To a client's device without waiting for it: a GPU copies on its own only from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def epoch_orders(rng: np.random.Generator, num_samples: int, epochs: int) -> np.ndarray:
    """A fresh permutation of the client's samples for each epoch, int64 `[epochs * num_samples]`."""
    orders = [rng.permutation(num_samples) for _ in range(epochs)]
    return np.concatenate([np.empty(0, np.int64), *orders]).astype(np.int64)


def batch_bounds(num_samples: int, batch_size: int, epochs: int) -> list[tuple[int, int]]:
    """Start and stop of every batch in the concatenated orders.

    No batch spans two epochs and the last of an epoch may be smaller, down to one sample; a client with fewer
    samples than a batch has one batch an epoch, one without samples has none.
    """
    assert batch_size >= 1
    return [
        (epoch * num_samples + start, epoch * num_samples + min(start + batch_size, num_samples))
        for epoch in range(epochs)
        for start in range(0, num_samples, batch_size)
    ]
