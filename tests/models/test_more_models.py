"""Models of texts, and those that come from elsewhere."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional

from fedspec_dist.config import ConfigError, load
from fedspec_dist.config.methods import MODELS
from fedspec_dist.models.text import LstmLayer

TOKENS = torch.tensor([[3, 4, 5, 0, 0], [6, 1, 2, 7, 3], [5, 0, 0, 0, 0]])


def build(model: str, shape: tuple[int, ...], num_outputs: int, **parameters: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model].build(shape, num_outputs, **parameters)


@pytest.mark.parametrize("outputs", ["sequence", "tokens"])
@pytest.mark.parametrize("name", ["lstm_text", "transformer_text"])
def test_models_of_texts(name: str, outputs: str) -> None:
    model = build(name, (5,), 8, vocabulary_size=8, outputs=outputs).double().eval()
    scores = model(TOKENS)
    assert scores.shape == ((3, 8) if outputs == "sequence" else (3, 5, 8))
    assert torch.equal(scores, model.classify(model.represent(TOKENS)))
    if outputs == "sequence":  # what pads has no part
        longer = build(name, (5,), 8, vocabulary_size=8).double().eval()
        other = TOKENS.clone()
        other[0, 4] = 0
        torch.testing.assert_close(longer(other), longer(TOKENS))
    else:  # nor has what comes later
        other = TOKENS.clone()
        other[1, 3:] = torch.tensor([1, 1])
        torch.testing.assert_close(model(other)[1, :3], scores[1, :3])
        assert not torch.allclose(model(other)[1, 3], scores[1, 3])
    theta = {key: value.detach() for key, value in model.named_parameters()}
    rows = vmap(jacrev(lambda t, x: functional_call(model, t, (x[None],))[0]), in_dims=(None, 0))(theta, TOKENS)
    assert all(value.isfinite().all() for value in rows.values())


def test_the_lstm_is_torchs() -> None:
    ours, theirs = LstmLayer(3, 4).double(), nn.LSTM(3, 4, batch_first=True).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.weight_ih)
        theirs.weight_hh_l0.copy_(ours.weight_hh)
        theirs.bias_ih_l0.copy_(ours.bias)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0])


def test_embeddings_may_be_the_last_layers_too() -> None:
    sizes = [
        sum(
            p.numel()
            for p in build("transformer_text", (5,), 9, vocabulary_size=9, outputs="tokens", **tied).parameters()
        )
        for tied in ({}, {"tie_embeddings": True})
    ]
    assert sizes[0] - sizes[1] == 9 * 64
    with pytest.raises(ValueError, match=r"^model\.tie_embeddings"):
        build("transformer_text", (5,), 2, vocabulary_size=9, tie_embeddings=True)
    tied = build("transformer_text", (5,), 99, vocabulary_size=99, outputs="tokens", tie_embeddings=True)
    loss = functional.cross_entropy(tied(TOKENS).flatten(0, 1), TOKENS.flatten())
    assert abs(loss.item() - math.log(99)) < 1  # it begins with a guess
    assert not tied.embedding.weight[0].any()
    with pytest.raises(ValueError, match=r"^model\.projection: 3 given, but embedding\.weight and fc\.weight are one"):
        tied.add_projection(3)


def test_a_vit_takes_images_of_any_sides_that_the_patch_divides() -> None:
    model = build("vit_small", (2, 6, 15), 4, patch=3, width=8, depth=1, heads=2)
    assert model(torch.randn(2, 2, 6, 15)).shape == (2, 4)
    for shape, message in [((2, 6, 14), "model.patch: got 3; .* which are 6x14"), ((6,), "takes images")]:
        with pytest.raises(ValueError, match=message):
            build("vit_small", shape, 4, patch=3)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("resnet18", {}, 11_689_512),
        ("resnet50", {}, 25_557_032),
        ("mobilenet_v2", {}, 3_504_872),
        ("densenet121", {}, 7_978_856),
        ("vgg11", {}, 132_863_336),
        ("squeezenet1_1", {}, 1_235_496),
    ],
)
def test_torchvisions_networks_have_their_published_sizes(name: str, given: dict[str, Any], expected: int) -> None:
    with torch.device("meta"):
        model = MODELS["torchvision"].build((3, 224, 224), 1000, name=name, **given)
    assert sum(p.numel() for p in model.parameters()) == expected


FAMILIES = (
    *("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "squeezenet1_1", "googlenet"),
    *("inception_v3", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "shufflenet_v2_x0_5"),
    *("efficientnet_b0", "convnext_tiny", "vit_b_32", "swin_t"),
)


@pytest.mark.filterwarnings("error:The default weight initialization")
@pytest.mark.parametrize("name", FAMILIES)
def test_torchvisions_networks_with_group_norm_and_one_channel(name: str) -> None:
    size = 96 if name == "inception_v3" else 64
    with torch.device("meta"):  # the shapes alone
        model = build("torchvision", (1, size, size), 7, name=name, norm="group").eval()
        assert model(torch.randn(2, 1, size, size)).shape == (2, 7)
    assert not [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    assert not [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize(("name", "norm"), [("resnet18", "batch"), ("resnet18", "group"), ("mobilenet_v2", "batch")])
def test_torchvisions_networks_can_be_differentiated_for_each_sample(name: str, norm: str) -> None:
    model = build("torchvision", (3, 32, 32), 2, name=name, norm=norm).eval()
    images = torch.randn(2, 3, 32, 32)
    theta = {key: value.detach() for key, value in model.named_parameters()}
    rows = vmap(jacrev(lambda t, x: functional_call(model, t, (x[None],))[0]), in_dims=(None, 0))(theta, images)
    gradients = torch.autograd.grad(model(images)[1, 1], list(model.parameters()))
    for row, gradient in zip(rows.values(), gradients, strict=True):
        torch.testing.assert_close(row[1, 1], gradient, rtol=1e-3, atol=1e-4)


def test_the_stem_of_small_images_keeps_their_size() -> None:
    seen = []
    model = build("torchvision", (3, 16, 16), 5, name="resnet18", stem="cifar").eval()
    model.layer1.register_forward_hook(lambda part, inputs, outputs: seen.append(outputs.shape[2:]))
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 5)
    assert seen == [(16, 16)]
    with pytest.raises(ValueError, match=r"^model\.stem: got 'cifar' with vgg11"):
        build("torchvision", (3, 16, 16), 5, name="vgg11", stem="cifar")


def test_pretrained_weights(tmp_path: Path) -> None:
    before = build("torchvision", (3, 32, 32), 10, name="resnet18")
    torch.save(before.state_dict(), tmp_path / "w.pt")
    torch.manual_seed(1)
    after = MODELS["torchvision"].build((3, 32, 32), 4, name="resnet18", pretrained=str(tmp_path / "w.pt"))
    assert torch.equal(after.layer2[0].conv1.weight, before.layer2[0].conv1.weight)
    assert after.fc.weight.shape == (4, 512)
    assert after.notes == [
        f"model.pretrained: {tmp_path}/w.pt lacks, or has in other shapes, fc.weight, fc.bias: these start anew"
    ]
    with torch.device("meta"):  # its size alone is asked for: nothing is read
        build("torchvision", (3, 32, 32), 4, name="resnet18", pretrained="none.pt")
    (tmp_path / "text.pt").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(before, tmp_path / "whole.pt")
    for name, path, message in [
        ("resnet34", "w.pt", "does not fit resnet34: layer1.2.conv1.weight, .* and .* more missing"),
        ("resnet18", "none.pt", "cannot be read .FileNotFoundError"),
        ("resnet18", "text.pt", "cannot be read"),
        ("resnet18", "whole.pt", "cannot be read .UnpicklingError: Weights only"),
        ("resnet18", "list.pt", "holds no state"),
        ("resnet18", ".", "cannot be read .IsADirectoryError"),
    ]:
        with pytest.raises(ValueError, match=rf"^model\.pretrained: .*{message}"):
            build("torchvision", (3, 32, 32), 4, name=name, pretrained=str(tmp_path / path))


def test_pretrained_weights_as_torchvision_publishes_them(tmp_path: Path) -> None:
    """Without counters; those of the densenets with dots where torch has none any more."""
    before = build("torchvision", (3, 32, 32), 1000, name="densenet121")
    state = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): value
        for key, value in before.state_dict().items()
        if "num_batches_tracked" not in key
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in state
    save_file(state, tmp_path / "w.safetensors")
    torch.manual_seed(1)
    path = str(tmp_path / "w.safetensors")
    after = MODELS["torchvision"].build((1, 32, 32), 4, name="densenet121", pretrained=path)
    different = {key for key, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[key])}
    assert different == {"features.conv0.weight", "classifier.weight", "classifier.bias"}


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        return self.fc(x.flatten(1))


class Sized(nn.Sequential):
    def __init__(self, input_shape, num_outputs, hidden=5):
        width = math.prod(input_shape)
        super().__init__(nn.Flatten(), nn.Linear(width, hidden), nn.Linear(hidden, num_outputs))


class Raising(nn.Module):
    def __init__(self):
        raise RuntimeError("no such luck\nnor here")


class NoModule:
    pass


def leaving() -> nn.Module:
    sys.exit("a script")


HERE = "tests.models.test_more_models"


@pytest.mark.parametrize(("name", "arguments"), [("Nothing", None), ("Sized", None), ("Sized", {"hidden": 2})], ids=str)
def test_a_module_by_its_path(name: str, arguments: dict[str, Any] | None) -> None:
    model = build("module", (3, 2, 2), 3, path=f"{HERE}:{name}", arguments=arguments)
    assert model(torch.ones(2, 3, 2, 2)).shape == (2, 3)


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("no_such_module:Net", None, "could not be loaded .ModuleNotFoundError"),
        (f"{HERE}:Nobody", None, "could not be loaded .AttributeError"),
        (f"{HERE}:HERE", None, "is a str; allowed is a class"),
        (f"{HERE}:NoModule", None, "is a class, but no torch.nn.Module; derive it from that"),
        (f"{HERE}:Raising", None, "raised RuntimeError: no such luck when it was made$"),
        (f"{HERE}:leaving", None, "raised SystemExit: a script when it was made$"),
        (f"{HERE}:Sized", {"hidden": -1}, "raised RuntimeError: .* when it was made$"),
        (f"{HERE}:Sized", {"depth": 2}, r"is called with \(.*depth=...\), but takes \(input_shape"),
    ],
)
def test_a_path_that_is_none(path: str, arguments: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.path: .*{message}"):
        build("module", (3, 2, 2), 3, path=path, arguments=arguments)


@pytest.mark.parametrize("path", ["Net", "my_nets.Net", ":Net", "my_nets:", "my nets:Net", "..nets:Net", "a:b:c"])
def test_what_is_no_path_is_refused_before_anything_is_imported(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: got .*; must be module:Name"):
        load(None, [f"model={{type: module, path: '{path}'}}"])
