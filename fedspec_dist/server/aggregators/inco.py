"""InCo aggregation: deep convolutions of a residual stage lean on the stage's first block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.core.parameters import Segment

_CONVOLUTION = re.compile(r"(.*?)(\d+)\.conv([12])\.weight")
_EPSILON = 1e-7
_LARGEST_ENTRY = 0.1


class InCo:
    """The weighted mean of the updates, with the kernels of later residual blocks mixed with those of the first one.

    A kernel `g` of the mean, in `conv1` or `conv2` of a stage's later blocks, meets `r`, the one at its place in
    `conv2` of the stage's first block:

        g' = (g^ + c r^) (|| g || + || r ||) / 2        c = clip(| <r^, g^> | / <r^, r^>, 0, clamp_max)

    with `g^ = g / || g ||`, `r^ = r / || r ||` (1e-7 added to each denominator); entries of `g'` beyond +-0.1 are cut.
    Every other tensor is averaged as in FedAvg. One client: not FedAvg. `r = 0`: half of `g`. `g = 0`: stays 0. The
    form for transformers, and clients of different depths, are left out.

    Diagnostics: `inco/cut`, the share of the mixed entries that were cut.

    Y.-H. Chan, R. Zhou, R. Zhao, Z. Jiang, E. C.-H. Ngai, "Internal Cross-layer Gradients for Extending Homogeneity to
    Heterogeneity in Federated Learning", ICLR 2024, and its released program.

    Raises:
        ValueError: from `direction`, the model has no such convolutions.
    """

    def __init__(self, clamp_max: float) -> None:
        self.clamp_max = clamp_max

    def check(self, segments: Sequence[Segment]) -> None:
        cross_layer_pairs(segments)

    def direction(self, cohort: Cohort) -> Direction:
        pairs = cross_layer_pairs(cohort.segments)
        mean = cohort.slicing.whole(cohort.updates.combine(cohort.weights))
        result, num_cut, num_mixed = mean.clone(), 0, 0
        for target, reference in pairs:
            kernels, references = (mean[s.start : s.stop].reshape(s.shape) for s in (target, reference))
            mixture = mixed(kernels, references, self.clamp_max)
            result[target.start : target.stop] = mixture.clamp(-_LARGEST_ENTRY, _LARGEST_ENTRY).reshape(-1)
            num_cut += int((mixture.abs() > _LARGEST_ENTRY).sum())
            num_mixed += target.size
        return Direction(cohort.slicing.slice(result), {"inco/cut": num_cut / num_mixed})


def cross_layer_pairs(segments: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    """Every convolution that leans on another, and that other one.

    Blocks are known by names like `blocks.3.conv1.weight`. A stage is a run of blocks of one list whose `conv2` have
    one shape; its first `conv2` is the reference of every `conv1` and `conv2` of that shape in its later blocks.

    Raises:
        ValueError: there are none.
    """
    blocks: dict[tuple[str, str], dict[str, Segment]] = {}
    for segment in segments:
        if match := _CONVOLUTION.fullmatch(segment.name):
            blocks.setdefault((match[1], match[2]), {})[match[3]] = segment
    residual = [(path, block) for (path, _), block in blocks.items() if "2" in block]
    pairs = []
    for _, stage in groupby(residual, key=lambda item: (item[0], item[1]["2"].shape)):
        first, *later = [block for _, block in stage]
        pairs += [(s, first["2"]) for block in later for s in block.values() if s.shape == first["2"].shape]
    if not pairs:
        raise ValueError(
            "server.aggregator: inco mixes convolutions between residual blocks of one width, conv1 and conv2, and the "
            "parameters that train have none; use model: resnet20, or another aggregator"
        )
    return pairs


def mixed(kernels: Tensor, references: Tensor, clamp_max: float) -> Tensor:
    """`g'` for each kernel of `[out, in, height, width]`, before entries are cut: the formula at `InCo`."""
    norms, reference_norms = (t.square().sum((2, 3), keepdim=True).sqrt() for t in (kernels, references))
    unit, reference_unit = kernels / (norms + _EPSILON), references / (reference_norms + _EPSILON)
    overlap = (reference_unit * unit).sum((2, 3), keepdim=True).abs()
    c = (overlap / (reference_unit.square().sum((2, 3), keepdim=True) + _EPSILON)).clamp(0, clamp_max)
    return (unit + c * reference_unit) * (norms + reference_norms) / 2
