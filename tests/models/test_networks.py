"""What a loss sees of a model: features, intermediate levels and the projection head."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional

from fedspec_dist.config.methods import MODELS
from fedspec_dist.models.network import Network
from tests.models.test_models_build import IMAGES

SHAPE = (3, 16, 16)


@dataclass(frozen=True)
class Row:
    name: str
    width: int  # of the features
    levels: list[tuple[int, ...]]  # without the batch
    parameters: dict = field(default_factory=dict)
    bias: bool = True  # of the classifier


ROWS = [
    Row("mlp", 200, [(200,), (200,)]),
    Row("mlp", 5, [(7,), (6,), (5,)], {"hidden": [7, 6, 5]}),
    Row("mlp", 3 * 16 * 16, [], {"hidden": []}),
    Row("cnn", 64, [(16, 16, 16), (32, 8, 8), (64, 4, 4)]),
    Row("cnn", 8, [(2, 16, 16), (4, 8, 8), (8, 4, 4)], {"width": 2, "norm": "none"}),
    Row("cnn8k", 16, [(4, 16, 16), (8, 8, 8), (16,)], bias=False),
    Row("cnn23k", 32, [(6, 16, 16), (12, 8, 8), (32,)], bias=False),
    Row("cnn207k", 61, [(12, 16, 16), (24, 8, 8), (48, 4, 4), (61,)], bias=False),
    Row("lenet", 84, [(6, 12, 12), (16, 2, 2), (120,), (84,)]),
    Row("resnet18", 32, [(4, 16, 16), (4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2)], {"width": 4}),
    Row("vit_small", 8, [(8, 16)] * 2, {"width": 8, "depth": 2, "heads": 2}),
    Row("resnet20", 64, [(16, 16, 16), (16, 16, 16), (32, 8, 8), (64, 4, 4)]),
]
EVERY = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.parameters or ''}")


def build(row: Row, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    model = MODELS[row.name].build(SHAPE, 10, **row.parameters)
    assert isinstance(model, Network)
    return model


def images() -> torch.Tensor:
    return torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(1))


def count(model: Network) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_model_has_a_row() -> None:
    assert {row.name for row in ROWS} == set(IMAGES)


@EVERY
def test_forward_is_the_classifier_on_the_features(row: Row) -> None:
    model = build(row)
    features = model.represent(images())
    assert features.shape == (4, row.width)
    logits = model.classify(features)
    assert logits.shape == (4, 10)
    assert torch.equal(model(images()), logits)


@EVERY
def test_levels_are_what_the_activations_get(row: Row) -> None:
    model = build(row)
    levels: list[torch.Tensor] = []
    features = model.represent(images(), levels)
    assert [tuple(level.shape) for level in levels] == [(4, *shape) for shape in row.levels]
    assert all(level.min() < 0 for level in levels)
    assert torch.equal(features, model.represent(images()))
    if levels and row.name != "vit_small":  # which ends with a norm
        last = functional.relu(levels[-1])
        assert torch.equal(features, last if last.dim() == 2 else last.mean((2, 3)))


def test_levels_of_resnet_are_the_stem_and_the_last_block_of_each_stage() -> None:
    model = build(ROWS[-1])
    levels: list[torch.Tensor] = []
    model.represent(images(), levels)
    x = model.norm(model.conv(images()))
    assert torch.equal(levels[0], x)
    for i, block in enumerate(model.blocks):
        x = block(functional.relu(x))
        if i in (2, 5, 8):
            assert torch.equal(levels[1 + i // 3], x)


@EVERY
def test_levels_carry_gradients(row: Row) -> None:
    model = build(row)
    levels: list[torch.Tensor] = []
    model.represent(images(), levels)
    for level in levels:
        (gradient,) = torch.autograd.grad(level.square().sum(), [next(model.parameters())], retain_graph=True)
        assert gradient.abs().max() > 0


@EVERY
def test_projection(row: Row) -> None:
    plain, model = build(row), build(row)
    model.add_projection(12)
    d = row.width
    head = d * d + d + d * 12 + 12
    assert count(model) - count(plain) == head + (12 - d) * 10
    assert (getattr(model, model.classifier).bias is not None) == row.bias

    h = plain.represent(images())
    z = model.represent(images())
    l1, l2 = model.projection.l1, model.projection.l2
    expected = functional.relu(h @ l1.weight.T + l1.bias) @ l2.weight.T + l2.bias
    assert torch.allclose(z, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(images()), model.classify(z))
    assert model(images()).shape == (4, 10)


@EVERY
def test_projection_keeps_the_names_of_the_backbone(row: Row) -> None:
    plain, model = build(row), build(row)
    model.add_projection(12)
    added = {f"projection.{layer}.{kind}" for layer in ("l1", "l2") for kind in ("weight", "bias")}
    before, after = dict(plain.named_parameters()), dict(model.named_parameters())
    assert set(after) == set(before) | added
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith(f"{model.classifier}."))


def test_levels_do_not_change_with_a_projection() -> None:
    model = build(ROWS[0])
    plain: list[torch.Tensor] = []
    model.represent(images(), plain)
    model.add_projection(3)
    projected: list[torch.Tensor] = []
    assert model.represent(images(), projected).shape == (4, 3)
    assert all(torch.equal(one, other) for one, other in zip(plain, projected, strict=True))
