"""FedAvg: plain local SGD.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", 2017, algorithm 1.
"""

from __future__ import annotations

from fedspec_dist.clients.algorithms.base import LocalAlgorithm


class FedAvg(LocalAlgorithm):
    """No correction: the step follows the data gradient."""
