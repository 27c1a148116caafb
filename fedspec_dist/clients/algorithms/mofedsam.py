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

    Raises:
        ValueError: `alpha` is not in (0, 1], or `rho` is negative.
    """

    def __init__(self, alpha: float = 0.1, rho: float = 0.1, filter_ascent: bool = False) -> None:
        FedCM.__init__(self, alpha)
        FedSAM.__init__(self, rho, filter_ascent=filter_ascent)
