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

    "SpecGradFilter: A Spectral Gradient Filtering Framework for Taming Federated Heterogeneity", FFT-based realization.
    """
    d = gradient.shape[-1]
    cut = num_removed(d, ratio)
    if cut == 0:
        return gradient
    spectrum = torch.fft.rfft(gradient.to(_fft_dtype(gradient.dtype)))
    spectrum[..., :cut] = 0
    return torch.fft.irfft(spectrum, n=d).to(gradient.dtype)


class HighPass:
    """`high_pass` on every given layer of a flat gradient `[..., P]`, in place; the rest stays as it is, bit for bit.

    Layers of equal size share one FFT call, which costs far less than one call each.

    Raises:
        ValueError: `ratio` is outside [0, 1).
    """

    def __init__(self, segments: Sequence[Segment], ratio: float = 0.05) -> None:
        if not 0 <= ratio < 1:
            raise ValueError(f"filter.ratio: must be at least 0 and below 1, got {ratio}")
        self.ratio = ratio
        self._starts: dict[int, list[int]] = {}
        for segment in segments:
            if num_removed(segment.size, ratio):
                self._starts.setdefault(segment.size, []).append(segment.start)
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, gradient: Tensor) -> None:
        """Filters `gradient [P]` or `[C, P]`, of any floating dtype, on its device and without waiting for it."""
        for size, starts in self._starts.items():
            layers = [gradient.narrow(-1, start, size) for start in starts]
            stacked = self._buffer(size, len(layers), gradient)
            torch.stack(layers, dim=-2, out=stacked[..., : len(layers), :])
            filtered = high_pass(stacked, self.ratio).unbind(-2)
            torch._foreach_copy_(layers, list(filtered[: len(layers)]))

    def _buffer(self, size: int, num_layers: int, gradient: Tensor) -> Tensor:
        leading = gradient.shape[:-1]
        # MKL takes twice as long for one long row as for two, so a lone layer gets a row of zeros for company.
        num_rows = max(num_layers, 2) if leading.numel() == 1 else num_layers
        shape = (*leading, num_rows, size)
        dtype = _fft_dtype(gradient.dtype)
        buffer = self._buffers.get(size)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (shape, dtype, gradient.device):
            buffer = self._buffers[size] = torch.zeros(shape, dtype=dtype, device=gradient.device)
        return buffer


def _fft_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
