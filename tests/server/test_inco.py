"""InCo's worked numbers, and which convolutions lean on which."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import AGGREGATORS, MODELS
from fedspec_dist.core.parameters import ParameterLayout, Segment
from fedspec_dist.server.aggregators.inco import cross_layer_pairs, mixed
from tests.reference import dense_cohort, inco_kernel

G = torch.tensor([[[[1.0, 1], [0, 0]]]], dtype=torch.float64)
REFERENCE = torch.tensor([[[[1.0, 0], [0, 0]]]], dtype=torch.float64)


def kernel(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64).reshape(1, 1, 2, 2)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(1.0, (1.7071065751, 0.8535533302, 0, 0)), (0.01, (0.0170709462, 0.0085354736, 0, 0))],
)
def test_worked_numbers(scale: float, expected: tuple[float, ...]) -> None:
    result = mixed(scale * G, scale * REFERENCE, 5.0)
    torch.testing.assert_close(result, kernel(*expected), rtol=0, atol=1e-9)


def test_without_a_reference_half_is_left_and_zero_stays_zero() -> None:
    torch.testing.assert_close(mixed(G, torch.zeros_like(G), 5.0), G / 2, rtol=1e-6, atol=0)
    assert not mixed(torch.zeros_like(G), REFERENCE, 5.0).any()


def test_the_overlap_counts_whatever_its_sign() -> None:
    result = mixed(-G, REFERENCE, 5.0)
    c = 1 / 2**0.5
    expected = (-G / 2**0.5 + c * REFERENCE) * (1 + 2**0.5) / 2
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_clamp_max_bounds_the_share_of_the_reference() -> None:
    half = mixed(REFERENCE, REFERENCE, 0.5)
    torch.testing.assert_close(half, 1.5 * REFERENCE, rtol=1e-6, atol=0)
    torch.testing.assert_close(mixed(REFERENCE, REFERENCE, 0.0), REFERENCE, rtol=1e-6, atol=0)


def test_every_pair_of_channels_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    kernels, references = torch.randn(2, 3, 4, 3, 3, generator=generator, dtype=torch.float64)
    result = mixed(kernels, references, 5.0)
    for o in range(3):
        for i in range(4):
            torch.testing.assert_close(result[o, i], inco_kernel(kernels[o, i], references[o, i], 5.0))


def two_blocks(width: int = 1) -> list[Segment]:
    shape = (width, width, 2, 2)
    size = 4 * width * width
    names = ("layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2")
    return [Segment(f"{name}.weight", shape, i * size, size) for i, name in enumerate(names)]


def test_entries_are_cut_and_counted() -> None:
    updates = torch.cat([kernel(9, 9, 9, 9), REFERENCE, G, 0.01 * G]).reshape(1, -1)
    result = AGGREGATORS["inco"].build().direction(dense_cohort(updates, segments=two_blocks()))
    later = result.slice[8:].reshape(2, 1, 1, 2, 2)
    torch.testing.assert_close(later[0], kernel(0.1, 0.1, 0, 0))
    assert later.abs().max() == 0.1
    # All of G's two entries, and of the last kernel (norms 0.014 and 1) both.
    assert result.diagnostics == {"inco/cut": 4 / 8}
    assert torch.equal(result.slice[:8], updates[0, :8]), "what is not mixed is averaged and not cut"


def test_references_and_targets_of_resnet20() -> None:
    layout = ParameterLayout(MODELS["resnet20"].build((3, 32, 32), 10))
    pairs = [(target.name, reference.name) for target, reference in cross_layer_pairs(layout.segments)]
    assert pairs == [
        (f"blocks.{block}.conv{i}.weight", f"blocks.{first}.conv2.weight")
        for first in (0, 3, 6)
        for block in (first + 1, first + 2)
        for i in (1, 2)
    ]


def test_lists_of_blocks_are_stages_even_of_one_width() -> None:
    segments = [Segment(f"layer{s}.{b}.conv2.weight", (4, 4, 3, 3), 0, 144) for s in (1, 2) for b in (0, 1)]
    pairs = [(target.name, reference.name) for target, reference in cross_layer_pairs(segments)]
    assert pairs == [(f"layer{s}.1.conv2.weight", f"layer{s}.0.conv2.weight") for s in (1, 2)]


def test_convolutions_of_another_shape_are_left_alone() -> None:
    narrow = Segment("blocks.1.conv1.weight", (2, 4, 1, 1), 0, 8)
    first, last = (Segment(f"blocks.{b}.conv2.weight", (4, 4, 3, 3), 8, 144) for b in (0, 1))
    assert [target.name for target, _ in cross_layer_pairs([first, narrow, last])] == ["blocks.1.conv2.weight"]


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if not row.gives and not row.needs])
def test_models_without_residual_stages_are_refused(name: str) -> None:
    layout = ParameterLayout(MODELS[name].build((3, 32, 32), 10))
    cohort = dense_cohort(torch.zeros(2, len(layout)), segments=layout.segments)
    with pytest.raises(ValueError, match=r"^server\.aggregator: inco mixes .* use model: resnet20"):
        AGGREGATORS["inco"].build().direction(cohort)


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_models_that_give_blocks_have_them(name: str) -> None:
    assert "blocks" in MODELS[name].gives
    assert cross_layer_pairs(ParameterLayout(MODELS[name].build((3, 8, 8), 10)).segments)


def test_one_block_a_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^server\.aggregator: inco mixes"):
        cross_layer_pairs(two_blocks()[:2])
