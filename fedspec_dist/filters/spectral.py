"""SpecGradFilter: a high-pass filter on gradients, layer by layer, in the frequency domain."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedspec_dist.parameters import Segment

# A row of so many float32 and its spectrum fit into a core's first-level cache.
_LONG = 2048


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

    def __call__(self, gradient: Tensor) -> None:
        """Filters `gradient [P]` or `[C, P]`, of any floating dtype, on its device and without waiting for it."""
        for size, starts in self._starts.items():
            cut = num_removed(size, self.ratio)
            num_parts = _num_parts(size, cut)
            layers = [_interleaved(gradient.narrow(-1, start, size), num_parts) for start in starts]
            filtered = _filter_parts(torch.stack(layers, dim=-3).to(_fft_dtype(gradient.dtype)), cut)
            torch._foreach_copy_(layers, list(filtered.unbind(-3)))


def _num_parts(d: int, cut: int) -> int:
    """Into how many interleaved parts to cut a layer: as many as still have all `cut` frequencies, up to eight.

    Short FFTs stay in the cache: eight take a third of the time of a long one. A short layer is left whole.
    """
    if d < _LONG:
        return 1
    return next(parts for parts in (8, 4, 2, 1) if parts == 1 or (d % parts == 0 and 2 * parts * cut <= d))


def _interleaved(layer: Tensor, num_parts: int) -> Tensor:
    """A view of `layer [..., d]` as `[..., A, d / A]`, `A = num_parts`: part a has the samples a, a + A, ..."""
    return layer.view(*layer.shape[:-1], -1, num_parts).transpose(-1, -2)


def _filter_parts(parts: Tensor, cut: int) -> Tensor:
    """Removes the `cut` lowest frequencies of a layer from its interleaved parts `[..., A, d / A]`.

    With `F_a[k]` the spectrum of part a, the layer's is `X[k] = sum_a w^(a k) F_a[k]`, `w = exp(-2 pi i / d)`: the last
    step of the FFT by J. W. Cooley and J. W. Tukey, 1965. A wave of frequency k has the spectra `w^(-a k) X[k] / A`.
    """
    num_parts, length = parts.shape[-2:]
    spectra = torch.fft.rfft(parts)
    low = spectra[..., :cut]
    if num_parts == 1:
        low.zero_()
    else:
        forward, backward = _factors(num_parts, cut, num_parts * length, low.dtype, low.device)
        low.addcmul_((low * forward).sum(-2, keepdim=True), backward, value=-1)
    return torch.fft.irfft(spectra, n=length)


@functools.lru_cache(maxsize=64)
def _factors(num_parts: int, cut: int, d: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """`w^(a k)` and `w^(-a k) / A`, each `[A, cut]`."""
    turns = torch.arange(num_parts, dtype=torch.float64)[:, None] * torch.arange(cut) / d
    forward = torch.polar(torch.ones_like(turns), -2 * math.pi * turns)
    return forward.to(device, dtype), (forward.conj() / num_parts).to(device, dtype)


def _fft_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
