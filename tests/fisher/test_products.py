"""Products with the Fisher matrix against the dense matrix, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedspec_dist.fisher import products
from fedspec_dist.fisher.products import Product, fisher_product, from_jacobians, matrix_free
from fedspec_dist.tasks.classification import Classification
from tests.reference import dense_fisher, softmax_curvature

TASK = Classification()
Forward = Callable[[Tensor, Tensor], Tensor]


def functional(module: nn.Module) -> tuple[Forward, Tensor]:
    named = dict(module.double().named_parameters())
    sizes = [parameter.numel() for parameter in named.values()]
    theta = torch.cat([parameter.detach().reshape(-1) for parameter in named.values()])

    def forward(vector: Tensor, inputs: Tensor) -> Tensor:
        pieces = zip(named.items(), vector.split(sizes), strict=True)
        return functional_call(module, {name: piece.view_as(p) for (name, p), piece in pieces}, (inputs,))

    return forward, theta


def small_network() -> tuple[Forward, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.GroupNorm(1, 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return functional(module)


def images(num_samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_samples)
    return torch.randn(num_samples, 1, 6, 6, generator=generator, dtype=torch.float64)


def columns(num_parameters: int, num_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return torch.randn(num_parameters, num_columns, generator=generator, dtype=torch.float64)


def jacobians(forward: Forward, theta: Tensor, inputs: Tensor, chunk: int) -> Product:
    return from_jacobians(forward, theta, inputs, TASK.curvature_root, chunk)


def streamed(forward: Forward, theta: Tensor, inputs: Tensor, chunk: int) -> Product:
    return from_jacobians(forward, theta, inputs, TASK.curvature_root, chunk, max_kept=0)


def partly_kept(forward: Forward, theta: Tensor, inputs: Tensor, chunk: int) -> Product:
    return from_jacobians(forward, theta, inputs, TASK.curvature_root, chunk, max_kept=2)


def free(forward: Forward, theta: Tensor, inputs: Tensor, chunk: int) -> Product:
    return matrix_free(forward, theta, inputs, TASK.curvature, chunk, column_chunk_size=4)


every_product = pytest.mark.parametrize("make", [jacobians, streamed, partly_kept, free])


@every_product
@pytest.mark.parametrize(
    ("num_samples", "chunk", "num_columns"),
    [
        pytest.param(7, 3, 5, id="last block partial"),
        pytest.param(6, 3, 4, id="blocks even"),
        pytest.param(1, 3, 2, id="one sample"),
        pytest.param(5, 1, 1, id="one column, one sample a block"),
        pytest.param(5, 64, 60, id="more columns than parameters"),
    ],
)
def test_equals_the_dense_matrix(
    make: Callable[..., Product],
    num_samples: int,
    chunk: int,
    num_columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, theta = small_network()
    # A block of two samples, so that blocks, chunks and kept rows have different ends.
    monkeypatch.setattr(products, "_BLOCK_BYTES", {"cpu": 2 * 3 * theta.nbytes})
    inputs, vectors = images(num_samples), columns(len(theta), num_columns)
    result = make(forward, theta, inputs, chunk)(vectors)
    expected = dense_fisher(forward, theta, inputs, softmax_curvature) @ vectors
    assert (result.dtype, result.shape) == (vectors.dtype, vectors.shape)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)


@every_product
def test_linear_softmax_by_hand(make: Callable[..., Product]) -> None:
    def forward(theta: Tensor, inputs: Tensor) -> Tensor:
        return inputs @ theta.view(2, 2).T

    inputs = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    theta = torch.zeros(4, dtype=torch.float64)
    leading = torch.tensor([[1.0], [2], [-1], [-2]], dtype=torch.float64)
    product = make(forward, theta, inputs, 2)
    torch.testing.assert_close(product(leading), 2.5 * leading)
    assert not product(torch.tensor([[1.0], [2], [1], [2]], dtype=torch.float64)).any()


@every_product
def test_is_symmetric_and_positive(make: Callable[..., Product]) -> None:
    forward, theta = small_network()
    vectors = columns(len(theta), 6)
    quadratic = vectors.T @ make(forward, theta, images(5), 2)(vectors)
    torch.testing.assert_close(quadratic, quadratic.T, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(quadratic).min() > -1e-12


@every_product
def test_same_bits_every_time_and_parameters_untouched(make: Callable[..., Product]) -> None:
    forward, theta = small_network()
    theta.requires_grad_(True)
    before, vectors = theta.detach().clone(), columns(len(theta), 3)
    product = make(forward, theta, images(5), 2)
    first = product(vectors)
    assert torch.equal(product(vectors), first)
    assert not first.requires_grad
    assert torch.equal(theta.detach(), before)


@every_product
def test_another_curvature_is_another_matrix(make: Callable[..., Product]) -> None:
    forward, theta = small_network()
    inputs, vectors = images(4), columns(len(theta), 2)
    maps = {"root": lambda _, t: 2 * t, "curvature": lambda _, t: 4 * t}
    kept = {jacobians: None, streamed: 0, partly_kept: 2}
    if make is free:
        product = matrix_free(forward, theta, inputs, maps["curvature"])
    else:
        product = from_jacobians(forward, theta, inputs, maps["root"], max_kept=kept[make])
    expected = dense_fisher(forward, theta, inputs, lambda row: 4 * torch.eye(len(row), dtype=row.dtype))
    torch.testing.assert_close(product(vectors), expected @ vectors, rtol=0, atol=1e-11)


def test_float32_stays_float32_and_near_float64() -> None:
    forward, theta = small_network()
    inputs, vectors = images(5), columns(len(theta), 3)
    expected = jacobians(forward, theta, inputs, 2)(vectors)
    for make in (jacobians, streamed, free):
        result = make(forward, theta.float(), inputs.float(), 2)(vectors.float())
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("num_columns", "kept_samples", "expected"),
    [(10, 5, "from_jacobians"), (2, 5, "from_jacobians"), (10, 4, "from_jacobians"), (2, 4, "matrix_free")],
)
def test_choice_by_size(num_columns: int, kept_samples: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, theta = small_network()
    inputs, vectors = images(5), columns(len(theta), num_columns)
    chosen: list[str] = []
    for name in ("from_jacobians", "matrix_free"):
        original = getattr(products, name)

        def spy(*args: object, _name: str = name, _original: Callable = original, **kwargs: object) -> Product:
            chosen.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(products, name, spy)
    product = fisher_product(
        forward,
        theta,
        inputs,
        TASK.curvature_root,
        TASK.curvature,
        num_columns=num_columns,
        memory_budget_bytes=kept_samples * 3 * theta.nbytes,
    )
    assert chosen == [expected]
    dense = dense_fisher(forward, theta, inputs, softmax_curvature)
    torch.testing.assert_close(product(vectors), dense @ vectors, rtol=0, atol=1e-13)


def test_rows_beyond_the_budget_are_not_kept() -> None:
    forward, theta = small_network()
    calls: list[int] = []

    def counting_root(outputs: Tensor, jacobian: Tensor) -> Tensor:
        calls.append(len(outputs))
        return TASK.curvature_root(outputs, jacobian)

    product = from_jacobians(forward, theta, images(7), counting_root, 4, max_kept=3)
    assert sum(calls) == 3
    product(columns(len(theta), 2))
    product(columns(len(theta), 2))
    assert sum(calls) == 3 + 2 * 4


@pytest.mark.parametrize(
    "build",
    [
        lambda *a: from_jacobians(*a, TASK.curvature_root),
        lambda *a: matrix_free(*a, TASK.curvature),
        lambda *a: fisher_product(*a, TASK.curvature_root, TASK.curvature, num_columns=2, memory_budget_bytes=1),
    ],
)
def test_without_samples(build: Callable[..., Product]) -> None:
    with pytest.raises(ValueError, match="Fisher matrix of a data set without samples"):
        build(*small_network(), images(0))
