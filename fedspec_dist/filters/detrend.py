"""LAP-D and GD: a layer's gradient less its local mean, the counterparts of SpecGradFilter without an FFT.

The paper leaves widths and ends to a supplement that was not available; `window`, `Gaussian` and the correction at the
ends of a layer are decisions of this project.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layerwise import RatioFilter, working_dtype


def detrended(gradient: Tensor, weights: tuple[float, ...]) -> Tensor:
    """`g[i] - sum_k w[|k|] g[i + k] / sum_k w[|k|]` of `gradient [..., d]`, k from -R to R with `i + k` inside.

    `weights` are `w[0], ..., w[R]`; they need no scale. Where a part of the kernel lies outside, the mean is over the
    rest of it (edge-corrected). It is summed as `w[|k|] (g[i] - g[i + k])`, so that a constant gives exactly 0. Linear,
    not a projection. Half precision is computed in float32 and rounded back.
    """
    g = gradient.to(working_dtype(gradient.dtype))
    total = _sums_at_once(g, weights) if g.is_cuda else _sums(g, weights)
    return total.div_(_weight_sums(weights, g.shape[-1], g.dtype, g.device)).to(gradient.dtype)


def _sums(g: Tensor, weights: tuple[float, ...]) -> Tensor:
    """`sum_k w[|k|] (g[i] - g[i + k])`, k by k."""
    total = torch.zeros_like(g)
    for k, weight in enumerate(weights[1:], start=1):
        step = g[..., k:] - g[..., :-k]
        total[..., k:].add_(step, alpha=weight)
        total[..., :-k].sub_(step, alpha=weight)
    return total


def _sums_at_once(g: Tensor, weights: tuple[float, ...]) -> Tensor:
    """The same as one product with the kernel: on a GPU, three small launches for each k cost more than the sums."""
    radius, d = len(weights) - 1, g.shape[-1]
    kernel, inside = _kernel(weights, g.dtype, g.device)
    steps = g.unsqueeze(-1) - pad(g, (radius, radius)).unfold(-1, 2 * radius + 1, 1)  # [..., d, 2 R + 1]
    num = min(radius, d)  # entries at either end, around which a part of the kernel lies outside
    steps.narrow(-2, 0, num).mul_(inside[:num])
    steps.narrow(-2, d - num, num).mul_(inside.flip(0, 1)[radius - num :])
    return steps @ kernel


@functools.lru_cache(maxsize=64)
def _kernel(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """`w[|k|]`, k from -R to R; and `[R, 2 R + 1]`, 1 where `i + k` is inside, i = 0, ..., R - 1, else 0."""
    radius = len(weights) - 1
    offsets = torch.arange(-radius, radius + 1)
    kernel = torch.tensor(weights, dtype=torch.float64)[offsets.abs()]
    return kernel.to(device, dtype), (torch.arange(radius)[:, None] + offsets >= 0).to(device, dtype)


@functools.lru_cache(maxsize=64)
def _weight_sums(weights: tuple[float, ...], d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[d]`: the sum of the weights that lie inside, around each entry."""
    sums = torch.tensor([*accumulate(weights)], dtype=torch.float64)
    to_the_left = sums[torch.arange(d).clamp(max=len(weights) - 1)]
    return (to_the_left + to_the_left.flip(0) - weights[0]).to(device, dtype)


def window(ratio: float) -> int:
    """`W`, the odd number nearest to `0.443 / f`, `f = ratio / 2` cycles per entry.

    At `f` the average of W entries lets half of the power pass, so that it matches the high-pass filter's edge.
    """
    return 2 * math.floor(0.443 / ratio) + 1


def gaussian_weights(sigma: float, radius: int) -> tuple[float, ...]:
    """`exp(-k^2 / (2 sigma^2))`, k = 0, ..., radius."""
    return tuple(math.exp(-(k**2) / (2 * sigma**2)) for k in range(radius + 1))


class _Detrend(RatioFilter):
    """`detrended` on every given layer that has at least `window(ratio)` entries; shorter ones pass bit for bit."""

    copies: ClassVar[int] = 9

    def takes_from(self, d: int) -> bool:
        return self.ratio > 0 and d >= window(self.ratio)

    def signal_filtered(self, signals: Tensor) -> Tensor:
        return detrended(signals, self.weights())

    @abstractmethod
    def weights(self) -> tuple[float, ...]:
        """The kernel at the current ratio, from its middle outwards."""


class LapD(_Detrend):
    """LAP-D: `g` less its moving average over `window(ratio)` entries.

    Above a ratio of 0.443 the window is one entry and nothing is left. "SpecGradFilter: A Spectral Gradient Filtering
    Framework for Taming Federated Heterogeneity", which leaves the window's width to its supplement.
    """

    def weights(self) -> tuple[float, ...]:
        return (1.0,) * ((window(self.ratio) + 1) // 2)


class Gaussian(_Detrend):
    """GD: `g` less its Gaussian mean, of `sigma = 0.1325 / f`, `f = ratio / 2`, cut off at `ceil(3 sigma)` entries.

    At `f` the mean lets half of the power pass. Its source is that of `LapD`, whose layers it acts on.
    """

    def weights(self) -> tuple[float, ...]:
        sigma = 0.265 / self.ratio
        return gaussian_weights(sigma, math.ceil(3 * sigma))
