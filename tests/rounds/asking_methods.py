"""A plugin whose server methods ask clients for statistics, read short vectors and draw from `cohort.generator()`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.statistics.base import Statistic
from fedspec_dist.config.methods import register
from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.server.protocols import AnyLayers, Transformed, Weights
from fedspec_dist.server.weights.shares import Stateless


class Alike(Stateless):
    """Weights by the cosine of a client's mean features to the mean over clients."""

    needs: ClassVar[frozenset[str]] = frozenset({"mean_features"})

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        features = cohort.short("mean_features")
        closeness = torch.cosine_similarity(features, features.mean(dim=0), dim=1)
        return Weights(torch.softmax(5 * closeness, 0), diagnostics={"alike/least": float(closeness.min())})


class Probe(Statistic):
    """The loss on the first sample and a random number, of the model after training."""

    when = "after"
    width = 2

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Tensor:
        return torch.stack([theta.square().sum(), 1 + torch.rand((), dtype=theta.dtype)])


class Drawing(AnyLayers):
    """A random mean of updates and of gradients, by what all ranks draw alike."""

    needs: ClassVar[frozenset[str]] = frozenset({"gradient", "class_features", "probe"})
    seen: ClassVar[list[Cohort]] = []

    def direction(self, cohort: Cohort) -> Direction:
        self.seen[:] = [cohort]
        drawn = torch.rand(cohort.updates.num_rows, generator=cohort.generator(), dtype=torch.float64)
        other = torch.rand(cohort.updates.num_rows, generator=cohort.generator("other"), dtype=torch.float64)
        shares = cohort.weights * drawn * cohort.short("probe")[:, 1]
        gradients = cohort.rows("gradient").combine(-0.01 * other)
        found = {"classes": float(cohort.short("class_features").sum()), "drawn": float(drawn.sum())}
        return Direction(cohort.updates.combine(shares / shares.sum()) + gradients, found)


class Shaking(AnyLayers):
    needs: ClassVar[frozenset[str]] = frozenset()

    def initial_state(self, population: int) -> dict[str, Tensor]:
        return {}

    def apply(self, cohort: Cohort, state: dict[str, Tensor]) -> Transformed:
        return Transformed(cohort, {f"{cohort.method}/draw": float(torch.rand((), generator=cohort.generator()))})


class Reporting(LocalAlgorithm):
    """Sends a short vector, which it adds up step by step, and a long one; the server moves by both."""

    uploads = {"norms": 3, "end": None}  # noqa: RUF012 - as a user writes it
    server = ("lengths",)

    def correct(self, vectors):
        norm = vectors.gradient.norm(dim=-1, keepdim=True)
        vectors.uploads["norms"].add_(torch.cat([norm, norm.square(), torch.ones_like(norm)], dim=-1))

    def end(self, vectors, update, client):
        vectors.uploads["end"].copy_(vectors.parameters)

    def server_step(self, cohort, direction, state):
        norms = cohort.short("norms")
        state["lengths"].add_(cohort.rows("end").combine(norms[:, 0] / norms[:, 2]))
        return direction + 1e-3 * state["lengths"].double()


class Wide(LocalAlgorithm):
    uploads = {"wide": 5000}  # noqa: RUF012


register("server.weights", "alike", f"{__name__}:Alike")
register("server.aggregator", "drawing", f"{__name__}:Drawing")
register("server.transforms", "shaking", f"{__name__}:Shaking")
register("local.algorithm", "reporting", f"{__name__}:Reporting")
register("local.algorithm", "wide", f"{__name__}:Wide")
register("statistics", "probe", f"{__name__}:Probe")
