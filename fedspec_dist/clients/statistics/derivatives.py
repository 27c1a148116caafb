"""Statistics as long as the model: the gradient, the Fisher diagonal, sketches of the Fisher matrix."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspec_dist.clients.statistics.base import Material, Statistic
from fedspec_dist.core import seeding
from fedspec_dist.core.parameters import with_parameters
from fedspec_dist.fisher.products import JACOBIAN_BLOCK_BYTES, fisher_diagonal, fisher_product
from fedspec_dist.fisher.sketch import random_basis, top_eigenpairs


class Gradient(Statistic):
    """`(1/n) sum_i grad l_i(theta)`, `[P]`: of the task's loss at the model that the client is sent, over its samples.

    It is not filtered, clipped or decayed. Batches add up weighted by their samples, so it is the mean over samples
    for losses that are means over those of a batch.
    """

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Tensor:
        material, total = self.material, torch.zeros_like(theta)
        at = theta.detach().clone().requires_grad_()
        for _, batch in material.batches(samples):
            loss = material.task.loss(with_parameters(material.module, material.layout, at), batch)
            total.add_(torch.autograd.grad(loss, at)[0], alpha=len(batch) / len(samples))
        return total


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
