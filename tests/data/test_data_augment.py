"""Crops and flips against a loop over images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspec_dist.data.images.augment import Augmentation

BOTH = [{"type": "crop", "padding": 3, "mode": "zero"}, "flip"]


def images(num: int = 6, channels: int = 3, height: int = 7, width: int = 5) -> torch.Tensor:
    return torch.randn(num, height, width, channels, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)


def slowly(batch: torch.Tensor, draws: torch.Tensor, padding: int, mode: str) -> torch.Tensor:
    """Pads, cuts and flips one image after the other."""
    height, width = batch.shape[2:]
    results = []
    for image, (down, right, flip) in zip(batch.numpy(), draws.tolist(), strict=True):
        around = ((0, 0), (padding, padding), (padding, padding))
        padded = np.pad(image, around, mode="edge" if mode == "edge" else "constant")
        top, left = padding + down, padding + right
        crop = padded[:, top : top + height, left : left + width]
        results.append(crop[:, :, ::-1].copy() if flip else crop)
    return torch.from_numpy(np.stack(results))


@pytest.mark.parametrize("mode", ["edge", "zero"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("padding", "channels"), [(0, 3), (2, 3), (2, 1), (9, 3)])
def test_gather_equals_the_loop(mode: str, flip: bool, padding: int, channels: int) -> None:
    augmentation = Augmentation(padding, mode, flip)
    data, index = images(channels=channels), torch.tensor([4, 4, 0, 5, 1, 3, 2, 0, 0, 0])
    draws = augmentation.draw(np.random.default_rng(3), len(index))
    batch = augmentation.gather(data, index, draws)
    assert torch.equal(batch, slowly(data[index], draws, padding, mode))
    assert batch.is_contiguous(memory_format=torch.channels_last)
    contiguous = augmentation.gather(data.contiguous(), index, draws)
    assert torch.equal(contiguous, batch)
    assert contiguous.is_contiguous()


def test_without_draws_images_are_taken_as_they_are() -> None:
    augmentation, index = Augmentation(2, "zero", flip=True), torch.tensor([4, 0, 4])
    for data in (images(), images().contiguous()):
        batch = augmentation.gather(data, index, None)
        assert torch.equal(batch, data[index])
        assert batch.stride() == data[index].stride()


def test_no_augmentation_selects_and_keeps_channels_last() -> None:
    data, index = images(), torch.tensor([5, 0, 0])
    nothing = Augmentation.from_entries([])
    assert nothing.does_nothing
    batch = nothing.gather(data, index)
    assert torch.equal(batch, data[index])
    assert batch.stride() == (105, 1, 15, 3)
    assert nothing.gather(data, index[:0]).shape == (0, 3, 7, 5)
    assert nothing.gather(data.contiguous(), index).is_contiguous()


def test_draws_cover_their_range_and_come_from_the_generator() -> None:
    augmentation = Augmentation.from_entries(BOTH)
    draws = augmentation.draw(np.random.default_rng(0), 500)
    assert draws.dtype == torch.int64
    assert draws.min(dim=0).values.tolist() == [-3, -3, 0]
    assert draws.max(dim=0).values.tolist() == [3, 3, 1]
    assert torch.equal(draws, augmentation.draw(np.random.default_rng(0), 500))
    assert Augmentation().draw(np.random.default_rng(0), 5).tolist() == [[0, 0, 0]] * 5


def test_from_entries() -> None:
    assert Augmentation.from_entries(["flip"]) == Augmentation(flip=True)
    assert Augmentation.from_entries([{"type": "flip"}, "crop"]) == Augmentation(4, "edge", True)
    assert Augmentation.from_entries(BOTH) == Augmentation(3, "zero", True)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["rotate"], "data.augment: 'rotate' given; allowed types are flip and crop"),
        ([{"padding": 4}], "allowed types are flip and crop"),
        (["flip", "flip"], "flip is given twice"),
        ([{"type": "flip", "p": 0.5}], "flip takes no parameters; given: p"),
        ([{"type": "crop", "size": 4}], "crop has no parameter 'size'; it takes padding and mode"),
        ([{"type": "crop", "padding": 0}], "padding 0 given; allowed is a whole number from 1"),
        ([{"type": "crop", "padding": True}], "padding True given"),
        ([{"type": "crop", "mode": "reflect"}], "mode 'reflect' given; allowed: edge, zero"),
    ],
)
def test_bad_entries(entries: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation.from_entries(entries)
