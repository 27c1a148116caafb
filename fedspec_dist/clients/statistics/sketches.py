"""Low-rank sketches of clients' Fisher matrices."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedspec_dist.clients.statistics.base import Material, Statistic
from fedspec_dist.core import seeding
from fedspec_dist.fisher.products import JACOBIAN_BLOCK_BYTES, fisher_product
from fedspec_dist.fisher.sketch import random_basis, top_eigenpairs

_COPIES = 5  # of the [P, rank + oversampling] matrix whose subspace is iterated; measured


class Sketches(Statistic):
    """Leading eigenpairs of `H_m = (1/N_m) sum_n J_n^T S_n J_n`, the Fisher matrix under the model's own distribution.

    Of the model that the client is sent; see `fisher.sketch`. The iteration of all clients of a round starts from the
    same basis, as published.
    """

    is_matrix: ClassVar[bool] = True

    def __init__(self, material: Material, rank: int, oversampling: int, power_iterations: int) -> None:
        super().__init__(material)
        self.rank, self.power_iterations = rank, power_iterations
        self._num_columns = rank + oversampling
        self._forward = material.forward()
        self._basis_seed: int | None = None

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues `[r]` and eigenvectors as rows `[r, P]`."""
        material, basis_seed = self.material, seeding.torch_seed(seed, "sketch", round_index)
        if basis_seed != self._basis_seed:
            self._basis = random_basis(len(theta), self._num_columns, basis_seed, theta.device, theta.dtype)
            self._basis_seed = basis_seed
        product = fisher_product(
            self._forward,
            theta,
            material.examples.batch(samples).inputs,
            material.task.curvature_root,
            material.task.curvature,
            num_columns=self._num_columns,
            memory_budget_bytes=material.memory_budget_bytes,
            spare_bytes=material.spare_bytes,
        )
        eigenvalues, vectors = top_eigenpairs(product, self._basis, self.rank, power_iterations=self.power_iterations)
        return eigenvalues, vectors.T

    def working_bytes(self, num_samples: int) -> int:
        material = self.material
        vector_bytes = len(material.layout) * next(material.module.parameters()).element_size()
        kept = min(num_samples * material.num_outputs * vector_bytes, material.memory_budget_bytes)
        return kept + JACOBIAN_BLOCK_BYTES + _COPIES * self._num_columns * vector_bytes
