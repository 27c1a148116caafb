from __future__ import annotations

import pytest
import torch
from torch import nn

from fedspec_dist.core.parameters import ParameterLayout


def _module() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(8, 3))
    return module.eval()


def test_offsets_follow_the_modules_order() -> None:
    layout = ParameterLayout(_module())
    assert [(s.name, s.start, s.size) for s in layout.segments] == [
        ("0.weight", 0, 18),
        ("0.bias", 18, 2),
        ("1.weight", 20, 2),
        ("1.bias", 22, 2),
        ("3.weight", 24, 24),
        ("3.bias", 48, 3),
    ]
    assert len(layout) == 51


def test_flatten_and_views_are_inverse() -> None:
    module = _module()
    layout = ParameterLayout(module)
    views = layout.views(layout.flatten(module))
    for name, parameter in module.named_parameters():
        assert torch.equal(views[name], parameter)
    assert layout.views(torch.zeros(4, 51))["3.weight"].shape == (4, 3, 8)


def test_binding_lets_the_vector_drive_the_module() -> None:
    module = _module()
    layout = ParameterLayout(module)
    vector = layout.flatten(module)
    inputs = torch.ones(1, 1, 4, 4)
    before = module(inputs)
    bound = layout.bind(module, vector)
    assert torch.equal(module(inputs), before)
    assert [p.shape for p in bound] == [torch.Size(s.shape) for s in layout.segments]
    vector.zero_()
    assert not module(inputs).any()


def test_frozen_parameters_are_left_out_and_get_no_gradient() -> None:
    module = _module()
    layout = ParameterLayout(module, ["3.*"])
    assert [s.name for s in layout.segments] == ["3.weight", "3.bias"]
    assert len(layout.bind(module, layout.flatten(module))) == 2
    module(torch.ones(1, 1, 4, 4)).sum().backward()
    assert module[0].weight.grad is None
    assert module[3].weight.grad is not None


def test_a_scalar_parameter_keeps_its_shape() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    layout = ParameterLayout(module)
    layout.bind(module, layout.flatten(module))
    assert module.scale.shape == ()


def test_patterns_that_match_nothing_are_named() -> None:
    with pytest.raises(ValueError, match=r"trainable: 'head\.\*' matches no parameter; there are: 0\.weight"):
        ParameterLayout(_module(), ["head.*"])
    with pytest.raises(ValueError, match=r"filter\.layers: 'x' matches no parameter"):
        ParameterLayout(_module()).select(["3.*", "x"])
