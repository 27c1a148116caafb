"""SpecGradFilter: a high-pass filter on gradients, layer by layer, in the frequency domain."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .layerwise import RatioFilter, replace_stacked, working_dtype

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
    return _without(gradient, slice(0, num_removed(gradient.shape[-1], ratio)))


def low_pass(gradient: Tensor, ratio: float) -> Tensor:
    """As `high_pass`, with `D` zeroing the last `num_removed(d, ratio)` coefficients: the paper's ablation."""
    n = gradient.shape[-1] // 2 + 1
    return _without(gradient, slice(n - num_removed(gradient.shape[-1], ratio), n))


def _without(gradient: Tensor, band: slice) -> Tensor:
    if band.start == band.stop:
        return gradient
    spectrum = torch.fft.rfft(gradient.to(working_dtype(gradient.dtype)))
    spectrum[..., band] = 0
    return torch.fft.irfft(spectrum, n=gradient.shape[-1]).to(gradient.dtype)


def high_pass_in_parts(signals: Tensor, cut: int) -> Tensor:
    """`high_pass` of `signals [..., d]` for `cut` of 1 or more, by the short FFTs of `_filter_parts`."""
    num_parts = _num_parts(signals.shape[-1], cut)
    return _filter_parts(_interleaved(signals, num_parts), cut).transpose(-1, -2).flatten(-2)


class LayerSpectrum(RatioFilter):
    """A filter that removes `num_removed(d, ratio)` of a layer's coefficients; where that is 0, nothing changes."""

    def takes_from(self, d: int) -> bool:
        return num_removed(d, self.ratio) > 0


class HighPass(LayerSpectrum):
    """SpecGradFilter: `high_pass` on every given layer of a flat gradient `[..., P]`, in place.

    Where any coefficient goes, a constant gradient becomes 0; where all of them go, every gradient does.
    """

    def replace(self, layers: list[Tensor], dim: int) -> None:
        # In the order in which they are stored, layers are cut into parts by the copies that are made anyway.
        d = layers[0].shape[-1]
        if d in self.permutations:
            return super().replace(layers, dim)
        cut = num_removed(d, self.ratio)
        num_parts = _num_parts(d, cut)
        replace_stacked(
            [_interleaved(layer, num_parts) for layer in layers], lambda parts: _filter_parts(parts, cut), dim
        )

    def signal_filtered(self, signals: Tensor) -> Tensor:
        return high_pass_in_parts(signals, num_removed(signals.shape[-1], self.ratio))


class LowPass(LayerSpectrum):
    """`low_pass` on every given layer of a flat gradient `[..., P]`, in place."""

    def signal_filtered(self, signals: Tensor) -> Tensor:
        return low_pass(signals, self.ratio)


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
