"""Every model: its size, the images it takes, and that torch.func can differentiate it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, jvp, stack_module_state, vjp, vmap

from fedspec_dist.config.methods import MODELS

CIFAR = (3, 32, 32)
# Of images, made of their shape alone; the others are in test_more_models.py.
IMAGES = sorted(
    name
    for name, entry in MODELS.items()
    if not entry.needs and all(default is not ... for _, default in entry.parameters.values())
)


def build(name: str, *arguments: object, **parameters: object) -> nn.Module:
    return MODELS[name].build(*arguments, **parameters)


def count(name: str, num_classes: int, **parameters: object) -> int:
    return sum(p.numel() for p in build(name, CIFAR, num_classes, **parameters).parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "expected"),
    [
        ("cnn8k", 10, 8_748),
        ("cnn23k", 10, 25_706),
        ("cnn207k", 10, 201_286),
        ("lenet", 10, 62_006),
        ("resnet20", 10, 272_474),
        ("resnet20", 100, 278_324),
        ("resnet20", 200, 284_824),
        ("mlp", 10, 3072 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
        ("cnn", 10, 24_458),
        ("resnet18", 10, 11_173_962),
    ],
)
def test_parameter_counts(name: str, num_classes: int, expected: int) -> None:
    assert count(name, num_classes) == expected


def test_parameters_of_the_models() -> None:
    assert count("mlp", 10, hidden=[]) == 3072 * 10 + 10
    assert count("cnn", 10, width=2) < count("cnn", 10)
    # Three biases for three pairs of scale and shift.
    assert count("cnn", 10) - count("cnn", 10, norm="none") == 2 * (16 + 32 + 64)
    # 19 convolutions and 2 projections: a pair each with norms, a bias each without.
    widths = 16 * 7 + 32 * 7 + 64 * 7
    assert count("resnet20", 10) - count("resnet20", 10, norm="none") == widths


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16), (1, 28, 28), (3, 32, 32), (3, 20, 33)])
def test_forward(name: str, shape: tuple[int, int, int]) -> None:
    if name == "lenet" and shape[1] < 16:
        pytest.skip("too small for LeNet; see test_too_small")
    if name == "vit_small" and shape[2] % 4:
        pytest.skip("patches of 4x4 do not divide it")
    torch.manual_seed(0)
    model = build(name, shape, 7).double().eval()
    images = torch.randn(3, *shape, dtype=torch.float64)
    logits = model(images)
    assert logits.shape == (3, 7)
    in_channels_last = images.to(memory_format=torch.channels_last)
    assert torch.allclose(model(in_channels_last), logits, rtol=1e-10, atol=1e-12)
    assert torch.allclose(model(images[1:2]), logits[1:2], rtol=1e-10, atol=1e-12)  # samples do not mix


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def smallest(name: str) -> tuple[int, int, int]:
    return (2, 16, 16) if name == "lenet" else (2, 8, 8)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("name", IMAGES)
def test_torch_func(name: str, norm: str) -> None:
    given = {"norm": norm} if "norm" in MODELS[name].parameters else {}
    if not given and norm != "group":
        pytest.skip("has no norm to choose")
    if name == "resnet18":
        given["width"] = 4
    torch.manual_seed(0)
    model = build(name, smallest(name), 3, **given).double().eval()
    images = torch.randn(2, *smallest(name), dtype=torch.float64)
    theta = parameters(model)

    def logits(theta: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return functional_call(model, theta, (image[None],))[0]

    jacobian = vmap(jacrev(logits), in_dims=(None, 0))(theta, images)
    rows = torch.cat([jacobian[key].flatten(2) for key in theta], dim=2)  # [B, C, P]
    expected = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)])
            for sample in model(images)
            for value in sample
        ]
    ).view_as(rows)
    assert torch.allclose(rows, expected, rtol=1e-8, atol=1e-10)

    direction = {key: torch.randn_like(value) for key, value in theta.items()}
    flat = torch.cat([value.flatten() for value in direction.values()])
    _, product = jvp(lambda t: functional_call(model, t, (images,)), (theta,), (direction,))
    assert torch.allclose(product, rows @ flat, rtol=1e-8, atol=1e-9)
    # Forward mode under vmap: several directions at once.
    many = {key: torch.stack([value, -2 * value]) for key, value in direction.items()}
    products = vmap(lambda d: jvp(lambda t: functional_call(model, t, (images,)), (theta,), (d,))[1])(many)
    assert torch.allclose(products, torch.stack([product, -2 * product]), rtol=1e-8, atol=1e-9)

    _, pull = vjp(lambda t: functional_call(model, t, (images,)), theta)
    cotangent = torch.randn(2, 3, dtype=torch.float64)
    pulled = torch.cat([value.flatten() for value in pull(cotangent)[0].values()])
    assert torch.allclose(pulled, torch.einsum("bc,bcp->p", cotangent, rows), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", IMAGES)
def test_a_seed_makes_one_model(name: str) -> None:
    given = {"width": 4} if name == "resnet18" else {}
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(parameters(build(name, smallest(name), 3, **given)))
    one, same, other = models
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", [name for name in IMAGES if "dropout" in MODELS[name].parameters])
def test_dropout_is_for_training(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, smallest(name), 3, dropout=0.5, **({"width": 4} if name == "resnet18" else {}))
    images = torch.randn(2, *smallest(name))
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("name", IMAGES)
def test_vmap_over_clients(name: str) -> None:
    models = [build(name, smallest(name), 3).eval() for _ in range(2)]
    theta, _ = stack_module_state(models)
    images = torch.randn(2, 4, *smallest(name))
    batched = vmap(lambda t, x: functional_call(models[0], t, (x,)))(theta, images)
    expected = torch.stack([model(batch) for model, batch in zip(models, images, strict=True)])
    assert torch.allclose(batched, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet", (1, 8, 8), "lenet needs images of at least 16x16 pixels; the data set's are 8x8"),
        ("lenet", (1, 16, 15), "lenet needs .* 16x15"),
        ("cnn", (3, 3, 3), "cnn needs images of at least 4x4"),
        ("cnn8k", (3, 3, 8), "cnn8k needs images of at least 4x4"),
        ("cnn207k", (3, 3, 8), "cnn207k needs images"),
    ],
)
def test_too_small(name: str, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, shape, 10)


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet", (1, 16, 16)), ("cnn", (1, 4, 4)), ("cnn8k", (1, 4, 4)), ("resnet20", (1, 1, 1))]
)
def test_just_large_enough(name: str, shape: tuple[int, int, int]) -> None:
    assert build(name, shape, 10)(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_group_norm_has_two_groups() -> None:
    groups = {m.num_groups for m in build("resnet20", CIFAR, 10).modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {2}
