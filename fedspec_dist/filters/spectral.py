"""SpecGradFilter: a high-pass filter on gradients, layer by layer, in the frequency domain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedspec_dist.parameters import Segment


def num_removed(d: int, ratio: float) -> int:
    """`floor(ratio * n)`, the lowest of the `n = d // 2 + 1` real-FFT coefficients of a layer of size `d` that go."""
    # 1e-9: in binary, 0.29 * 100 is just below 29.
    return int(ratio * (d // 2 + 1) + 1e-9)


def high_pass(gradient: Tensor, ratio: float) -> Tensor:
    """`irfft(D rfft(g))` of `gradient [..., d]`, with `D` zeroing the first `num_removed(d, ratio)` coefficients.

    A linear orthogonal projection along the last dimension, the flattened layer. Where no coefficient is removed the
    gradient is returned as it is, bit for bit. Half precision is computed in float32 and rounded back.

    SpecGradFilter; section "spectral filter" of the paper: ratio 0.05.
    """
    d = gradient.shape[-1]
    cut = num_removed(d, ratio)
    if cut == 0:
        return gradient
    spectrum = torch.fft.rfft(gradient.to(_fft_dtype(gradient.dtype)))
    spectrum[..., :cut] = 0
    return torch.fft.irfft(spectrum, n=d).to(gradient.dtype)


class HighPass:
    """`high_pass` on every layer of a flat gradient `[..., P]`, in place.

    Raises:
        ValueError: `ratio` is outside [0, 1).
    """

    def __init__(self, segments: Sequence[Segment], ratio: float = 0.05) -> None:
        if not 0 <= ratio < 1:
            raise ValueError(f"filter.ratio: must be in [0, 1), got {ratio}")
        self.ratio = ratio
        self.segments = tuple(segments)

    def __call__(self, gradient: Tensor) -> None:
        for segment in self.segments:
            layer = gradient[..., segment.start : segment.stop]
            layer.copy_(high_pass(layer, self.ratio))


def _fft_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
