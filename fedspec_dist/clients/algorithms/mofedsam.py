"""MoFedSAM: sharpness-aware local steps with the server's momentum.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu, "Generalized Federated Learning via Sharpness Aware Minimization",
ICML 2022, algorithm 2.
"""

from __future__ import annotations

from fedspec_dist.clients.algorithms.fedcm import FedCM
from fedspec_dist.clients.algorithms.fedsam import FedSAM


class MoFedSAM(FedSAM, FedCM):
    """Every step follows `alpha g + (1 - alpha) m`: FedSAM's `g`, at `y + e`, in FedCM's mixture and with its `m`.

    The ascent `e` follows the loss itself, not the mixture; `filter_ascent` is FedSAM's. `alpha = 1` is FedSAM and
    `rho = 0` is FedCM, bit for bit.
    """

    def __init__(self, alpha: float, rho: float, filter_ascent: bool) -> None:
        FedCM.__init__(self, alpha)
        FedSAM.__init__(self, rho, adaptive=False, eta=0.0, filter_ascent=filter_ascent)
