"""Clip: updates shortened to at most a given norm."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.protocols import Transformed
from fedspec_dist.server.transforms.mixed import mix


class Clip:
    """`u_k <- u_k min(1, norm / ||u_k||)`, the whole update as one vector. Where none is longer, all stay bit for bit.

    Diagnostics: `clip/share`, of the clients that were longer; `clip/norm_median`, before.

    H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
    2018, flat clipping.
    """

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def initial_state(self, population: int) -> dict[str, Tensor]:
        return {}

    def apply(self, cohort: Cohort, state: dict[str, Tensor]) -> Transformed:
        norms = cohort.updates.norms()
        scale = torch.where(norms > self.norm, self.norm / norms, 1.0)
        diagnostics = {"clip/share": float((scale < 1).double().mean()), "clip/norm_median": float(norms.median())}
        return Transformed(replace(mix(cohort, scale), clip_norm=self.norm), diagnostics)
