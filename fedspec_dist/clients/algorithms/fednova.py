"""FedNova, the clients' half: local SGD that says how many steps it was worth.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020, section 4 and appendix. The server's half is an aggregator.
"""

from __future__ import annotations

from fedspec_dist.clients.algorithms.fedprox import FedProx


class FedNova(FedProx):
    """Plain local SGD, with `mu > 0` FedProx; reports `a`, its `effective_steps`:

        plain           a = K
        momentum rho    a = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho)
        proximal mu     a <- a (1 - lr mu) + 1, K times from 0

    so that `-(y - theta) / (lr a)` is a mean of the client's gradients. Weight decay counts as part of the gradient.
    The clients' steps are FedAvg's bit for bit with `mu = 0`, FedProx's otherwise. The formulas do not cover momentum
    together with `mu > 0`.
    """
