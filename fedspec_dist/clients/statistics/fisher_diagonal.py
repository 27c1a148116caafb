"""The diagonal of a client's Fisher matrix."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedspec_dist.clients.statistics.base import Material, Statistic
from fedspec_dist.fisher.products import JACOBIAN_BLOCK_BYTES, fisher_diagonal


class FisherDiagonal(Statistic):
    """`diag(H_m)`, `[P]`, of the matrix that `sketches` are of, at the model that the client has trained."""

    when: ClassVar[Literal["before", "after"]] = "after"

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self._forward = material.forward()

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Tensor:
        inputs = self.material.examples.batch(samples).inputs
        return fisher_diagonal(self._forward, theta, inputs, self.material.task.curvature_root)

    def working_bytes(self, num_samples: int) -> int:
        return JACOBIAN_BLOCK_BYTES
