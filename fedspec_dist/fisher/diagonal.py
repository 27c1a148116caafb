"""The diagonal of the Fisher matrix of a data set."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspec_dist.core.batch import Inputs
from fedspec_dist.fisher.products import Forward, OutputMap, jacobian_blocks


def fisher_diagonal(forward: Forward, theta: Tensor, inputs: Inputs, root: OutputMap) -> Tensor:
    """`diag(H)`, `[P]` in the dtype of `theta`: the mean over samples of `E_y (d log p(y | x) / d theta)^2`.

    The expectation is over the model's own distribution, so no label enters. With `H = A^T A / N`, the rows of A being
    those of all `F_n J_n` (see `fisher.products`), it is the sum of squares of A's rows over N. Nothing of size N is
    kept.

    Raises:
        ValueError: there are no samples.
    """
    total = torch.zeros_like(theta)
    for rows in jacobian_blocks(forward, theta, inputs, root):
        total += rows.square().sum(0)
    return total.div_(len(inputs[0] if isinstance(inputs, tuple) else inputs))
