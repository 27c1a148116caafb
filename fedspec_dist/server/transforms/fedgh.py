"""FedGH before another aggregator."""

from __future__ import annotations

from torch import Tensor

from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.aggregators.fedgh import conflict_ratio, harmonize
from fedspec_dist.server.protocols import Transformed
from fedspec_dist.server.transforms.mixed import mix


class Harmonize:
    """Conflicts between pairs of clients projected out of their updates; the formula and the paper are at `harmonize`.

    Before `fedavg` this is the aggregator `fedgh`, bit for bit. Without a conflict all stay as they are.

    Diagnostics: `fedgh/conflict_ratio`.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def initial_state(self, population: int) -> dict[str, Tensor]:
        return {}

    def apply(self, cohort: Cohort, state: dict[str, Tensor]) -> Transformed:
        gram = cohort.updates.gram()
        diagnostics = {"fedgh/conflict_ratio": conflict_ratio(gram)}
        return Transformed(mix(cohort, harmonize(gram, self.mode)), diagnostics)
