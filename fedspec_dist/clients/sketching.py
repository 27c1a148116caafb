"""What a client tells of its Fisher matrix, over its own data without augmentation, of the model in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedspec_dist.clients.executors.base import ClientWork, Rows, Sent, largest_entry
from fedspec_dist.core import seeding
from fedspec_dist.core.batch import Batch, Inputs
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.fisher.diagonal import fisher_diagonal
from fedspec_dist.fisher.products import Forward, fisher_product
from fedspec_dist.fisher.sketch import NonFiniteFisherError, random_basis, top_eigenpairs
from fedspec_dist.models.modes import evaluating

FISHER_DIAGONAL = "fisher_diagonal"
InputsOf = Callable[[Tensor], Inputs]  # positions in the training set [N] -> what the model takes


def with_parameters(module: nn.Module, layout: ParameterLayout, theta: Tensor) -> Callable[..., Any]:
    """The model with its parameters taken from `theta [P]`, in which it is differentiable; the others are its own."""
    # One split, not a slice for each layer: the backward of a slice fills a whole [P] with zeros.
    parts = theta.split([segment.size for segment in layout.segments])
    shaped = {s.name: part.reshape(s.shape) for s, part in zip(layout.segments, parts, strict=True)}
    return lambda *inputs: functional_call(module, shaped, inputs)


def as_function(module: nn.Module, layout: ParameterLayout, task: Any) -> Forward:
    """The model as `(theta [P], inputs) -> outputs`, differentiable in `theta`."""

    def forward(theta: Tensor, inputs: Inputs) -> Tensor:
        outputs: Tensor = task.outputs(with_parameters(module, layout, theta), Batch(inputs))
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
        inputs_of: InputsOf,
        settings: Any,
        memory_budget_bytes: int,
        spare_bytes: int = 0,
    ) -> None:
        self._module = module
        self._forward = as_function(module, layout, task)
        self._num_parameters = len(layout)
        self._task = task
        self._inputs_of = inputs_of
        self._settings = settings
        self._memory_budget_bytes, self._spare_bytes = memory_budget_bytes, spare_bytes
        self._seed: int | None = None

    def before(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        seed = seeding.torch_seed(sent.seed, "sketch", sent.round_index)  # the same for all clients, as published
        theta = sent.theta[: self._num_parameters]
        try:
            rows.sketches.append(self.sketch(theta, work.samples, seed))
        except NonFiniteFisherError:  # told to all ranks like an update that is not finite
            rows.sketches.append((theta.new_zeros(0), theta.new_zeros(0, len(theta))))
            return [theta.new_tensor(torch.inf)]
        return []

    def after(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        return []

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
            basis = random_basis(self._num_parameters, num_columns, seed, theta.device, theta.dtype)
            self._seed, self._basis = seed, basis
        product = fisher_product(
            self._forward,
            theta,
            self._inputs_of(samples),
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
    """The diagonal of the same matrix, at the client's model after its training."""

    def __init__(self, module: nn.Module, layout: ParameterLayout, task: Any, inputs_of: InputsOf) -> None:
        self._module = module
        self._forward = as_function(module, layout, task)
        self._num_parameters = len(layout)
        self._task = task
        self._inputs_of = inputs_of

    def before(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        return []

    def after(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        shared = slice(self._num_parameters)
        row = rows.uploads[FISHER_DIAGONAL][place, shared]
        row.copy_(self.diagonal(sent.theta[shared] + rows.updates[place, shared], work.samples))
        return [largest_entry(row)]

    def diagonal(self, theta: Tensor, samples: Tensor) -> Tensor:
        """`[P]`, for the training samples at positions `samples [N]`."""
        with evaluating(self._module):
            return fisher_diagonal(self._forward, theta, self._inputs_of(samples), self._task.curvature_root)
