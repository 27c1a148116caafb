"""A plugin whose methods all draw from the global generators of torch, numpy and python, one of each family."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.attacks import Attack
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.config.methods import FAMILIES, register
from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.data.images.synthetic import Synthetic
from fedspec_dist.filters.identity import Identity
from fedspec_dist.models.network import Network
from fedspec_dist.server.aggregators.means import FedAvg
from fedspec_dist.server.optimizers import Sgd
from fedspec_dist.server.protocols import Transformed, Weights
from fedspec_dist.server.transforms.mixed import mix
from fedspec_dist.server.weights.shares import Stateless
from fedspec_dist.tasks.classification import Classification


def draw(*shape: int) -> Tensor:
    """Around one; from all three generators."""
    return 0.9 + 0.2 * torch.rand(shape) + 0.01 * (np.random.rand() + random.random())


class Data(Synthetic):
    def load(self):
        arrays = super().load()
        return replace(arrays, train_images=arrays.train_images * draw(1).numpy())


def partition(samples, num_clients, rng):
    order = np.random.permutation(len(samples.labels))
    return [np.sort(part) for part in np.array_split(order, num_clients)]


class Dropout(Network):
    """With dropout, and with noise that is there in eval mode as well."""

    def __init__(self, input_shape, num_classes, noise=0.0):
        super().__init__()
        self.noise = noise
        self.hidden = nn.Linear(int(np.prod(input_shape)), 6)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(6, num_classes)
        self.scale = float(draw(1))

    def backbone(self, images, levels):
        features = self.dropout(torch.relu(self.hidden(images.flatten(1)))) * self.scale
        return features * (1 + self.noise * torch.rand_like(features)) if self.noise else features


class Filter(Identity):
    def __init__(self, segments=()):
        super().__init__(segments)
        self.scale = draw(1)

    def __call__(self, gradient):
        gradient.mul_(self.scale * draw(gradient.shape[-1]))


class Local(LocalAlgorithm):
    own = ("noise",)

    def begin(self, vectors, client):
        vectors.own["noise"].add_(draw(len(vectors.anchor)))

    def correct(self, vectors):
        vectors.gradient.mul_(draw(len(vectors.anchor))).add_(vectors.own["noise"], alpha=1e-3)


class Aggregator(FedAvg):
    def direction(self, cohort: Cohort) -> Direction:
        noisy = cohort.weights * draw(len(cohort.weights))
        merged = cohort.updates.columnwise(lambda u: (u * draw(*u.shape)).mean(0))
        return Direction(cohort.updates.combine(noisy / noisy.sum()) + merged, {"noise": float(noisy.sum())})


class Unkeyed(FedAvg):
    """What cannot be keyed: a generator of its own, seeded from nothing."""

    def direction(self, cohort: Cohort) -> Direction:
        return Direction(cohort.updates.combine(cohort.weights * random.Random().random()))


def unkeyed_partition(samples, num_clients, rng):
    order = np.random.default_rng().permutation(len(samples.labels))
    return [np.sort(part) for part in np.array_split(order, num_clients)]


class Weighting(Stateless):
    def initial_state(self, num_samples):
        return {"noise": draw(len(num_samples))}

    def weigh(self, cohort, state):
        noisy = cohort.weights * draw(len(cohort.weights)) * state["noise"][cohort.clients.ids]
        return Weights(noisy / noisy.sum())


class Transform:
    def initial_state(self, population):
        return {"noise": draw(population).double()}

    def apply(self, cohort, state):
        state["noise"].mul_(draw(len(state["noise"])).double())
        return Transformed(mix(cohort, draw(len(cohort.weights)).double() * state["noise"][cohort.clients.ids]))


class Shaken(Classification):
    """Every loss is weighted at random."""

    def output_loss(self, outputs, targets):
        return super().output_loss(outputs, targets) * draw(1)[0]


class Step(LocalSgd):
    def step(self, parameters, gradient, state, lr):
        super().step(parameters, gradient * draw(1), state, lr)


class Malice(Attack):
    def labels(self, labels, num_classes):
        return (labels + torch.randint(num_classes, labels.shape)) % num_classes

    def spoil(self, update, seed):
        update.mul_(draw(len(update)))


class Optimizer(Sgd):
    """Noise on every parameter, as for differential privacy."""

    def step(self, theta, direction, state):
        return super().step(theta, direction + 0.01 * torch.randn_like(direction), state)


NAMES = {
    "data.dataset": "Data",
    "data.partition": "partition",
    "task": "Shaken",
    "model": "Dropout",
    "filter": "Filter",
    "local.algorithm": "Local",
    "local.optimizer": "Step",
    "server.aggregator": "Aggregator",
    "server.weights": "Weighting",
    "server.optimizer": "Optimizer",
    "server.transforms": "Transform",
    "clients.attack": "Malice",
}
assert {*NAMES, "server.filter"} == set(FAMILIES), "a new family needs a row here"
PARAMETERS = {
    "model": {"noise": (float, 0.0)},
    "data.dataset": FAMILIES["data.dataset"].table["synthetic"].parameters,
    "server.optimizer": {"lr": (float, 1.0)},
}
for family, target in NAMES.items():
    register(family, "random_plugin", f"{__name__}:{target}", **PARAMETERS.get(family, {}))
register("server.aggregator", "unkeyed", f"{__name__}:Unkeyed")
register("data.partition", "unkeyed", f"{__name__}:unkeyed_partition")
