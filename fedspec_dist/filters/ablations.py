"""What SpecGradFilter is compared with to see what its low frequencies, and its shorter steps, are worth.

"SpecGradFilter: A Spectral Gradient Filtering Framework for Taming Federated Heterogeneity", ablations. The paper's
supplement, with their details, is not available; decisions of our own are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .spectral import LayerSpectrum, high_pass_in_parts, num_removed


class RandomSuppression(LayerSpectrum):
    """Zeroes `num_removed(d, ratio)` of a layer's real-FFT coefficients, drawn without replacement.

    Our decision: a new draw per layer and step, in the order of the layers given, from a generator that `prepare`
    seeds: one for each client of a gradient `[C, P]`. For each draw it is a linear orthogonal projection; where
    nothing is to be removed the layer keeps its bits, and nothing is drawn.
    """

    def prepare(self, round_number: int, seed: int | Sequence[int]) -> None:
        super().prepare(round_number, seed)
        seeds = [seed] if isinstance(seed, int) else seed
        self._generators = [np.random.default_rng(each) for each in seeds]
        self._of_one = isinstance(seed, int)

    def __call__(self, gradient: Tensor) -> None:
        draws: dict[int, list[Tensor]] = {}
        for generator in self._generators:
            for d in (segment.size for segment in self.segments if self.takes_from(segment.size)):
                draws.setdefault(d, []).append(self._draw(d, generator))
        self._removed = {}
        for d, masks in draws.items():
            stacked = torch.stack(masks)  # client by client, [C * L, n]
            self._removed[d] = _sent(
                stacked if self._of_one else stacked.unflatten(0, (len(self._generators), -1)), gradient.device
            )
        super().__call__(gradient)

    def signal_filtered(self, signals: Tensor) -> Tensor:
        d = signals.shape[-1]
        return torch.fft.irfft(torch.fft.rfft(signals).masked_fill_(self._removed[d], 0), n=d)

    def _draw(self, d: int, generator: np.random.Generator) -> Tensor:
        """Which coefficients go, `[d // 2 + 1]`."""
        n = d // 2 + 1
        # A torch.Generator would keep 32 bits of the seed only.
        drawn = generator.choice(n, num_removed(d, self.ratio), replace=False, shuffle=False)
        return torch.zeros(n, dtype=torch.bool).index_fill_(0, torch.from_numpy(drawn), True)


class L2Rescale(LayerSpectrum):
    """`g ||Phi(g)|| / ||g||` per layer, Phi the high-pass filter: its shorter step in the gradient's own direction.

    Our decision, as the paper does not define its "l2-norm rescaling". A gradient of 0 stays 0. Neither linear nor a
    projection, but it keeps scale: `filter(a g) = a filter(g)`.
    """

    copies: ClassVar[int] = 6

    def signal_filtered(self, signals: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(signals, dim=-1, keepdim=True)
        high = high_pass_in_parts(signals, num_removed(signals.shape[-1], self.ratio))
        kept = torch.linalg.vector_norm(high, dim=-1, keepdim=True)
        return signals * torch.where(norms == 0, 0, kept / norms)


def _sent(mask: Tensor, device: torch.device) -> Tensor:
    # Only from pinned memory does a copy to a GPU not wait for it.
    return (mask.pin_memory() if device.type == "cuda" else mask).to(device, non_blocking=True)
