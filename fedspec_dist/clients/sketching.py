"""What a client tells of its Fisher matrix, over its own data without augmentation, of the model in eval mode."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.fisher.diagonal import fisher_diagonal
from fedspec_dist.fisher.products import Forward, fisher_product
from fedspec_dist.fisher.sketch import random_basis, top_eigenpairs
from fedspec_dist.models.modes import evaluating


def as_function(module: nn.Module, layout: ParameterLayout) -> Forward:
    """The model as `(theta [P], inputs) -> outputs`, differentiable in `theta`."""

    def forward(theta: Tensor, inputs: Tensor) -> Tensor:
        # One split, not a slice for each layer: the backward of a slice fills a whole [P] with zeros.
        parts = theta.split([segment.size for segment in layout.segments])
        shaped = {s.name: part.reshape(s.shape) for s, part in zip(layout.segments, parts, strict=True)}
        outputs: Tensor = functional_call(module, shaped, (inputs,))
        return outputs

    return forward


class Sketcher:
    """Leading eigenpairs of `H_m = (1/N_m) sum_n J_n^T S_n J_n`, the Fisher matrix under the model's own distribution.

    `settings` has `rank`, `oversampling` and `power_iterations`; see `fisher.sketch`. The two amounts of memory are
    those of `fisher_product`.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        task: Any,
        images: Tensor,
        settings: Any,
        memory_budget_bytes: int,
        spare_bytes: int = 0,
    ) -> None:
        self._module = module
        self._forward = as_function(module, layout)
        self._num_parameters = len(layout)
        self._task = task
        self._images = images
        self._settings = settings
        self._memory_budget_bytes, self._spare_bytes = memory_budget_bytes, spare_bytes
        self._seed: int | None = None

    def sketch(self, theta: Tensor, samples: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues `[r]` and eigenvectors as rows `[r, P]` for the training samples at positions `samples [N]`.

        `seed` is that of the basis from which the iteration starts: clients with the same one share it.
        """
        with evaluating(self._module):
            return self._sketch(theta, samples, seed)

    def _sketch(self, theta: Tensor, samples: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        settings = self._settings
        num_columns = settings.rank + settings.oversampling
        if seed != self._seed:
            self._seed, self._basis = seed, random_basis(self._num_parameters, num_columns, seed, theta.device)
        product = fisher_product(
            self._forward,
            theta,
            self._images.index_select(0, samples),
            self._task.curvature_root,
            self._task.curvature,
            num_columns=num_columns,
            memory_budget_bytes=self._memory_budget_bytes,
            spare_bytes=self._spare_bytes,
        )
        eigenvalues, basis = top_eigenpairs(
            product, self._basis, settings.rank, power_iterations=settings.power_iterations
        )
        return eigenvalues, basis.T


class DiagonalFisher:
    """The diagonal of the same matrix, at any parameters."""

    def __init__(self, module: nn.Module, layout: ParameterLayout, task: Any, images: Tensor) -> None:
        self._module = module
        self._forward = as_function(module, layout)
        self._task = task
        self._images = images

    def diagonal(self, theta: Tensor, samples: Tensor) -> Tensor:
        """`[P]`, for the training samples at positions `samples [N]`."""
        inputs = self._images.index_select(0, samples)
        with evaluating(self._module):
            return fisher_diagonal(self._forward, theta, inputs, self._task.curvature_root)
