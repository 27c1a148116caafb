"""Random crops and flips of batches on the device: one gather, with the random numbers drawn outside.

Images lie in memory as `n, H, W, C` (channels last) or as `n, C, H, W` (contiguous), and so does the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MODES = ("edge", "zero")


@dataclass(frozen=True)
class Augmentation:
    """A crop out of the image padded by `padding` on each side, then a left-right flip of every second image.

    The defaults do nothing. Mode edge repeats the border pixels (FIPA); zero is, on normalised images, the
    mean colour.
    """

    padding: int = 0
    mode: str = "edge"
    flip: bool = False

    @classmethod
    def from_entries(cls, entries: Sequence[str | Mapping[str, Any]]) -> Augmentation:
        """From the entries of `data.augment`: `flip`, and `crop` or `{type: crop, padding: 4, mode: edge}`.

        Raises:
            ValueError: an unknown or repeated entry, an unknown parameter or value.
        """
        given: dict[str, Any] = {}
        for entry in entries:
            parameters = {"type": entry} if isinstance(entry, str) else dict(entry)
            kind = parameters.pop("type", None)
            if kind not in ("flip", "crop"):
                raise ValueError(f"data.augment: {entry!r} given; allowed types are flip and crop")
            if kind in given:
                raise ValueError(f"data.augment: {kind} is given twice")
            given[kind] = parameters
        if given.get("flip"):
            raise ValueError(f"data.augment: flip takes no parameters; given: {', '.join(given['flip'])}")
        padding, mode = _crop_parameters(given["crop"]) if "crop" in given else (0, "edge")
        return cls(padding, mode, "flip" in given)

    @property
    def does_nothing(self) -> bool:
        return self.padding == 0 and not self.flip

    def draw(self, rng: np.random.Generator, num: int) -> Tensor:
        """Random shifts down and right, `-padding..padding`, and whether to flip: int64 `[num, 3]`, CPU."""
        draws = np.zeros((num, 3), dtype=np.int64)
        if self.padding:
            draws[:, :2] = rng.integers(-self.padding, self.padding + 1, size=(num, 2))
        if self.flip:
            draws[:, 2] = rng.integers(2, size=num)
        return torch.from_numpy(draws)

    def gather(self, images: Tensor, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """The batch `images[index]`, augmented if there are draws: `[B, C, H, W]`, in memory as the images are.

        Args:
            images: `[n, C, H, W]`, on the device.
            index: int64 `[B]`, on the device.
            draws: int64 `[B, 3]` from `draw`, on the device; without them the images are taken as they are.
        """
        if images.is_contiguous() and images.shape[1] > 1:
            if draws is None or self.does_nothing:
                return images.index_select(0, index)
            return self._crop_and_flip_contiguous(images, index, draws)
        base = images.permute(0, 2, 3, 1)
        if draws is None or self.does_nothing:
            return _select(base, index).permute(0, 3, 1, 2)
        return self._crop_and_flip(base, index, draws).permute(0, 3, 1, 2)

    def _crop_and_flip(self, base: Tensor, index: Tensor, draws: Tensor) -> Tensor:
        _, height, width, channels = base.shape
        rows, columns = self._sources(height, width, draws)
        # Pixels as rows of one matrix: a single index_select copies C values at a time.
        pixels = (index[:, None] * height + rows.clamp(0, height - 1))[:, :, None] * width
        pixels = pixels + columns.clamp(0, width - 1)[:, None, :]  # [B, H, W]
        batch = base.view(-1, channels).index_select(0, pixels.reshape(-1))
        batch = batch.view(len(index), height, width, channels)
        if self.mode == "zero":
            # Factors in memory order: eight times as fast as a mask.
            factors = _inside(columns, width, batch.dtype)[:, :, None].expand(-1, -1, channels).flatten(1)
            lines = batch.view(len(index), height, -1)
            lines.mul_(_inside(rows, height, batch.dtype)[:, :, None]).mul_(factors[:, None, :])
        return batch

    def _crop_and_flip_contiguous(self, images: Tensor, index: Tensor, draws: Tensor) -> Tensor:
        """The same for images `n, C, H, W` in memory, a value at a time."""
        _, channels, height, width = images.shape
        rows, columns = self._sources(height, width, draws)
        pixels = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]  # [B, H, W]
        planes = index[:, None] * channels + torch.arange(channels, device=images.device)  # [B, C]
        values = planes[:, :, None, None] * (height * width) + pixels[:, None]
        batch = images.view(-1).index_select(0, values.reshape(-1)).view(values.shape)
        if self.mode == "zero":
            rows, columns = _inside(rows, height, batch.dtype), _inside(columns, width, batch.dtype)
            batch.mul_((rows[:, :, None] * columns[:, None, :])[:, None])
        return batch

    def _sources(self, height: int, width: int, draws: Tensor) -> tuple[Tensor, Tensor]:
        """From which rows `[B, H]` and columns `[B, W]` of an image a batch's pixels come; some are outside."""
        across = torch.arange(width, device=draws.device)
        down, right, flip = draws.unsqueeze(2).unbind(1)  # [B, 1] each
        rows = torch.arange(height, device=draws.device) + down
        return rows, torch.where(flip.bool(), width - 1 - across, across) + right


def _select(base: Tensor, index: Tensor) -> Tensor:
    """`base[index]` for `base [n, H, W, C]`, whole images at a time."""
    return base.view(len(base), -1).index_select(0, index).view(len(index), *base.shape[1:])


def _inside(positions: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """1 where the position is in the image, 0 in the padding."""
    return ((positions >= 0) & (positions < size)).to(dtype)


def _crop_parameters(given: Mapping[str, Any]) -> tuple[int, str]:
    unknown = sorted(set(given) - {"padding", "mode"})
    if unknown:
        raise ValueError(f"data.augment: crop has no parameter {unknown[0]!r}; it takes padding and mode")
    padding, mode = given.get("padding", 4), given.get("mode", "edge")
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 1:
        raise ValueError(f"data.augment: crop: padding {padding!r} given; allowed is a whole number from 1")
    if mode not in _MODES:
        raise ValueError(f"data.augment: crop: mode {mode!r} given; allowed: {', '.join(_MODES)}")
    return padding, mode
