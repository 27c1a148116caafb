"""Gradient centralization: every output unit's gradient without its mean."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedspec_dist.core.parameters import Segment

from .layerwise import LayerFilter


def centralized(gradient: Tensor) -> Tensor:
    """`g[o] - mean(g[o])` for each output unit o of `gradient [..., O, I]`: a linear orthogonal projection.

    H. Yong, J. Huang, X. Hua and L. Zhang, "Gradient Centralization: A New Optimization Technique for Deep Neural
    Networks", ECCV 2020, equation 1; on every client's gradients it is the local part of GC-Fed.
    """
    return gradient - gradient.mean(-1, keepdim=True)


class GradientCentralization(LayerFilter):
    """`centralized` on every given tensor of two axes or more, whose first axis are the outputs.

    Biases and normalisation's vectors pass bit for bit (GC-Fed's program takes their mean away, through an empty list
    of axes). A unit of one input is left with gradient 0.
    """

    copies: ClassVar[int] = 2

    def form(self, segment: Segment) -> tuple[int, ...]:
        return (segment.shape[0], segment.size // segment.shape[0]) if len(segment.shape) > 1 else (segment.size,)

    def changes(self, form: tuple[int, ...]) -> bool:
        return len(form) > 1

    def filtered(self, layers: Tensor) -> Tensor:
        return centralized(layers)
