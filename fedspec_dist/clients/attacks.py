"""Malicious clients, for studies of how servers bear them: false labels, or an update changed before it is sent.

What a client sends besides its update (control variates, sketches, Fisher diagonals) and what it keeps is that of its
honest training.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.core import seeding


class Attack:
    """None: labels and updates as they are. Every draw is keyed by seed, round and client."""

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        """What a malicious client has in place of its training labels `[n]`."""
        return labels

    def spoil(self, update: Tensor, seed: int) -> None:
        """Changes the update `[P]` that it sends, in place."""


class LabelFlip(Attack):
    """Every training label y becomes `C - 1 - y`; those that the model is tested on stay.

    M. Fang, X. Cao, J. Jia, N. Z. Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", USENIX
    Security 2020, section 4.1 (number from memory).
    """

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        return num_classes - 1 - labels


class SignFlip(Attack):
    """The update becomes `-factor` times itself."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def spoil(self, update: Tensor, seed: int) -> None:
        update.mul_(-self.factor)


class Scale(Attack):
    """The update becomes `factor` times itself, as a client does that wants its model to be the next one.

    E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020, model
    replacement.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def spoil(self, update: Tensor, seed: int) -> None:
        update.mul_(self.factor)


class Gaussian(Attack):
    """Noise `N(0, std^2 I)` in place of the update, as in the experiments of Blanchard et al. (Krum, NeurIPS 2017)."""

    def __init__(self, std: float) -> None:
        self.std = std

    def spoil(self, update: Tensor, seed: int) -> None:
        noise = torch.randn(update.shape, generator=torch.Generator().manual_seed(seed))
        update.copy_(self.std * noise)


def attackers(seed: int, fraction: float, population: Sequence[int]) -> tuple[int, ...]:
    """The `floor(fraction N)` malicious ones of N clients, in ascending order: a larger fraction has some more."""
    num = int(Fraction(str(fraction)) * len(population))
    order = seeding.generator(seed, "attackers").permutation(np.array(population, dtype=np.int64))
    return tuple(sorted(order[:num].tolist()))
