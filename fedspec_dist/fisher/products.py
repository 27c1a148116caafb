"""Products with the Fisher matrix of a data set.

    H = (1/N) sum_n J_n^T S_n J_n        J_n = d f(x_n) / d theta, [C, P]        S_n [C, C], the task's curvature

This is the Fisher matrix under the model's own distribution, which for softmax cross-entropy and for squared error is
the generalised Gauss-Newton matrix (Martens, "New Insights and Perspectives on the Natural Gradient Method", 2020,
section 9). No label enters. The task gives `S_n` as one of two callables on outputs `[B, C]` and matrices `[B, C, l]`:
`curvature`, `T -> S_n T_n`, and `root`, `T -> F_n T_n` with `F_n^T F_n = S_n`.

A model that draws random numbers even in eval mode draws them for each sample in `from_jacobians`.

Every product maps `[P, l]` to `[P, l]` in the dtype of `theta`, and raises `ValueError` when built without samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from fedspec_dist.core.batch import Inputs

Forward = Callable[[Tensor, Inputs], Tensor]  # theta [P], inputs [B, ...] -> outputs [B, C]
OutputMap = Callable[[Tensor, Tensor], Tensor]  # outputs [B, C], [B, C, l] -> [B, C, l]
Product = Callable[[Tensor], Tensor]  # [P, l] -> [P, l]

# Per-sample Jacobians are fastest in chunks of about the size of the cache on CPU, and several chunks share one matrix
# product: rows enough to be worth a pass over the [P, l] result. A GPU wants few and large launches of both.
JACOBIAN_BLOCK_BYTES = 2**27
_CHUNK_BYTES, _BLOCK_BYTES = {"cpu": 2**24}, {"cpu": JACOBIAN_BLOCK_BYTES}
_LARGE_BYTES = 2**29


def fisher_product(
    forward: Forward,
    theta: Tensor,
    inputs: Inputs,
    root: OutputMap,
    curvature: OutputMap,
    *,
    num_columns: int,
    memory_budget_bytes: int,
    spare_bytes: int = 0,
) -> Product:
    """The cheaper of the two products for matrices of about `num_columns` columns.

    Jacobians cost one backward pass per output, `matrix_free` a forward-mode and a backward pass per column. So
    Jacobians win where they fit into `memory_budget_bytes`, since they are then made once for all products, and where
    outputs do not outnumber columns, even if those that do not fit are made again in every product.

    `spare_bytes` of a GPU may be used as well for those that are kept. That is no part of the choice: what happens to
    be free must not decide the result.
    """
    _require_samples(inputs)
    num_outputs = _num_outputs(forward, theta, inputs)
    bytes_per_sample = num_outputs * theta.nbytes
    num_fitting = memory_budget_bytes // bytes_per_sample
    if num_fitting < _count(inputs) and num_outputs > num_columns:
        return matrix_free(forward, theta, inputs, curvature)
    max_kept = max(num_fitting, spare_bytes // bytes_per_sample)
    return from_jacobians(forward, theta, inputs, root, max_kept=max_kept)


def from_jacobians(
    forward: Forward,
    theta: Tensor,
    inputs: Inputs,
    root: OutputMap,
    chunk_size: int | None = None,
    *,
    max_kept: int | None = None,
) -> Product:
    """`V -> A^T (A V) / N` with the rows of `A [N * C, P]` being those of all `F_n J_n`.

    The rows of at most `max_kept` samples (all, by default) are computed here and kept; the others are computed again
    in every product, block by block. `chunk_size` samples are differentiated together. On a GPU whole blocks are kept,
    so that how many has no part in the result.
    """
    _require_samples(inputs)
    theta = theta.detach()
    num_outputs = _num_outputs(forward, theta, inputs)
    bytes_per_sample = num_outputs * theta.nbytes
    rows = _row_maker(forward, root, num_outputs, chunk_size or _chunk_size(theta, bytes_per_sample))
    num_samples = _count(inputs)
    num_kept = num_samples if max_kept is None else min(max_kept, num_samples)
    block_size = _block_size(theta, bytes_per_sample)
    if theta.device.type != "cpu" and num_kept < num_samples:
        num_kept -= num_kept % block_size
    kept = [rows(theta, block) for block in _blocks(inputs, block_size, 0, num_kept)]
    again = list(_blocks(inputs, block_size, num_kept, num_samples))

    def product(columns: Tensor) -> Tensor:
        total = torch.zeros_like(columns)
        for block_rows in chain(kept, (rows(theta, block) for block in again)):
            total.addmm_(block_rows.T, block_rows @ columns)
        return total.div_(num_samples)

    return product


def jacobian_blocks(forward: Forward, theta: Tensor, inputs: Inputs, root: OutputMap) -> Iterator[Tensor]:
    """The rows of all `F_n J_n`, `[n * C, P]` for some samples at a time, made when asked for."""
    _require_samples(inputs)
    theta = theta.detach()
    num_outputs = _num_outputs(forward, theta, inputs)
    bytes_per_sample = num_outputs * theta.nbytes
    rows = _row_maker(forward, root, num_outputs, _chunk_size(theta, bytes_per_sample))
    return (rows(theta, block) for block in _blocks(inputs, _block_size(theta, bytes_per_sample)))


def matrix_free(
    forward: Forward,
    theta: Tensor,
    inputs: Inputs,
    curvature: OutputMap,
    chunk_size: int = 64,
    *,
    column_chunk_size: int = 10,
) -> Product:
    """`V -> (1/N) sum_n J_n^T S_n (J_n V)` by forward- and reverse-mode products, keeping nothing of size N.

    Samples are streamed in blocks of `chunk_size`; `column_chunk_size` columns are differentiated together.
    """
    _require_samples(inputs)
    theta = theta.detach()

    def block_product(block: Inputs, tangent: Tensor) -> Tensor:
        def outputs_at(parameters: Tensor) -> Tensor:
            return forward(parameters, block)

        outputs, output_tangent = jvp(outputs_at, (theta,), (tangent,))[:2]
        pull_back = vjp(outputs_at, theta)[1]
        return pull_back(curvature(outputs, output_tangent.unsqueeze(-1)).squeeze(-1))[0]

    over_columns = vmap(block_product, in_dims=(None, 1), out_dims=1, chunk_size=column_chunk_size, randomness="same")

    def product(columns: Tensor) -> Tensor:
        total = torch.zeros_like(columns)
        for block in _blocks(inputs, chunk_size):
            total += over_columns(block, columns)
        return total.div_(_count(inputs))

    return product


def _row_maker(
    forward: Forward, root: OutputMap, num_outputs: int, chunk_size: int
) -> Callable[[Tensor, Inputs], Tensor]:
    """`(theta, inputs [B, ...]) -> [B * C, P]`, the rows of `F_n J_n`."""

    def outputs_twice(theta: Tensor, sample: Inputs) -> tuple[Tensor, Tensor]:
        outputs = forward(theta, _each(sample, lambda part: part.unsqueeze(0))).squeeze(0)
        return outputs, outputs

    per_sample = vmap(jacrev(outputs_twice, has_aux=True), in_dims=(None, 0), randomness="different")

    def rows(theta: Tensor, inputs: Inputs) -> Tensor:
        result = theta.new_empty(_count(inputs), num_outputs, len(theta))
        for part, chunk in zip(result.split(chunk_size), _blocks(inputs, chunk_size), strict=True):
            jacobian, outputs = per_sample(theta, chunk)
            part.copy_(root(outputs, jacobian))
        return result.flatten(0, 1)

    return rows


def _chunk_size(theta: Tensor, bytes_per_sample: int) -> int:
    return max(1, _CHUNK_BYTES.get(theta.device.type, _LARGE_BYTES) // bytes_per_sample)


def _block_size(theta: Tensor, bytes_per_sample: int) -> int:
    return max(1, _BLOCK_BYTES.get(theta.device.type, _LARGE_BYTES) // bytes_per_sample)


def _num_outputs(forward: Forward, theta: Tensor, inputs: Inputs) -> int:
    with torch.no_grad():
        return forward(theta, _each(inputs, lambda part: part[:1])).shape[-1]


def _require_samples(inputs: Inputs) -> None:
    if _count(inputs) == 0:
        raise ValueError("fisher: the Fisher matrix of a data set without samples is not defined")


def _count(inputs: Inputs) -> int:
    return len(inputs[0] if isinstance(inputs, tuple) else inputs)


def _each(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    return tuple(function(part) for part in inputs) if isinstance(inputs, tuple) else function(inputs)


def _blocks(inputs: Inputs, size: int, start: int = 0, stop: int | None = None) -> Iterator[Inputs]:
    """The samples from `start` to before `stop`, so many at a time."""
    stop = _count(inputs) if stop is None else stop
    for place in range(start, stop, size):
        inside = slice(place, min(place + size, stop))
        yield _each(inputs, lambda part, inside=inside: part[inside])  # type: ignore[misc]


def fisher_diagonal(forward: Forward, theta: Tensor, inputs: Inputs, root: OutputMap) -> Tensor:
    """`diag(H)`, `[P]` in the dtype of `theta`: the mean over samples of `E_y (d log p(y | x) / d theta)^2`.

    The expectation is over the model's own distribution, so no label enters. With `H = A^T A / N`, the rows of A being
    those of all `F_n J_n`, it is the sum of squares of A's rows over N. Nothing of size N is
    kept.

    Raises:
        ValueError: there are no samples.
    """
    total = torch.zeros_like(theta)
    for rows in jacobian_blocks(forward, theta, inputs, root):
        total += rows.square().sum(0)
    return total.div_(len(inputs[0] if isinstance(inputs, tuple) else inputs))
