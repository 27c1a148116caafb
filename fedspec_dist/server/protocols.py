"""What the rounds ask of the server's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.core.parameters import Segment


class Aggregator(Protocol):
    """`Cohort -> Direction`.

    What it asks of the clients besides updates stands beside its line in `config/methods.py`: `needs`, out of
    `config.methods.STATISTICS` and what plugins register there. `sketches` come as `cohort.sketches`, vectors as long
    as the model as `cohort.rows("gradient")`, short ones as `cohort.short("mean_features")`. Weightings and transforms
    may have such needs, too. All of them are told the round, `cohort.round_index`, and have draws that are the same on
    every rank: `cohort.generator()`.
    Where there is an attribute `memory`, it names vectors that the server keeps from round to round: float64 slices in
    `cohort.memory`, zero at first, which the aggregator changes in place.
    """

    def check(self, segments: Sequence[Segment]) -> None:
        """Before the run. Raises ValueError when these layers do not suit the method."""

    def direction(self, cohort: Cohort) -> Direction: ...


class AnyLayers:
    """What aggregators are that take any model."""

    memory: ClassVar[tuple[str, ...]] = ()

    def check(self, segments: Sequence[Segment]) -> None:
        """Nothing to say."""


@dataclass(frozen=True)
class Transformed:
    """A round after a transform, with scalars worth recording."""

    cohort: Cohort
    diagnostics: Mapping[str, float] = field(default_factory=dict)


class Transform(Protocol):
    """`Cohort -> Cohort`, for all that comes after it. What it remembers is in `state`, as a weighting's is.

    The weights of the cohort that it is given are those of the aggregation.
    """

    def initial_state(self, population: int) -> dict[str, Tensor]:
        """For N = `population` clients."""

    def apply(self, cohort: Cohort, state: dict[str, Tensor]) -> Transformed:
        """May change the tensors of `state` in place."""


@dataclass(frozen=True)
class Weights:
    """How much each client counts, `values [K]` float64 on the CPU, summing to 1.

    `shrink` multiplies the new model as a whole: `shrink * (theta + direction)`; 1 for all but methods that learn it.
    """

    values: Tensor
    shrink: float = 1.0
    diagnostics: Mapping[str, float] = field(default_factory=dict)


class Weighting(Protocol):
    """`Cohort -> Weights`. What it remembers is in `state`: small tensors, the same bits on every rank.

    The `weights` of the cohort that it is given are the clients' shares of the samples. One whose line needs `proxy`
    finds samples of the server's own in the cohort.
    """

    def initial_state(self, num_samples: Tensor) -> dict[str, Tensor]:
        """From the samples of all N clients, `[N]` int64."""

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        """May change the tensors of `state` in place."""


class ServerOptimizer(Protocol):
    """From the aggregated direction to the next parameters, slice by slice."""

    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        """The state for a slice of `num_columns` parameters, float64."""

    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        """New parameters `[n]` in the dtype of `theta [n]`, computed with `direction [n]` in float64 and rounded once.

        An optimizer with memory changes the tensors of `state` in place.
        """
