"""FedAvg: plain local SGD.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", 2017, algorithm 1.
"""

from __future__ import annotations

from fedspec_dist.clients.vectors import LocalVectors


class FedAvg:
    """No correction: the step follows the data gradient."""

    def correct(self, vectors: LocalVectors) -> None:
        pass
