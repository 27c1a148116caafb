"""FedDC: local drift decoupling and correction.

L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C.-Z. Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling
and Correction", CVPR 2022, in the form of the authors' program.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.algorithms.feddyn import FedDyn
from fedspec_dist.clients.algorithms.scaffold import renew_client_control, renew_server_control
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.cohort import Cohort


class FedDC(FedDyn):
    """FedDyn's drift `h_i` and server step together with SCAFFOLD's controls `c_i` and `c` (option 2).

    Every step follows

        g + alpha (y - theta + h_i) + (c - c_i)

    then `h_i <- h_i + D_i` and `c_i <- c_i - c - D_i / (lr K_i)` with `D_i = y_i - theta`; the server's `c` moves by
    1/N of the sum of those changes, and the model to `theta + direction + 1/N sum_{all} h_i`.

    The learning rate is this round's; the authors' program takes the undecayed one. Default: the authors', for CIFAR.

    Left out: the program divides a client's alpha and c by `weight_i = n_i N / n`, and weighs its change of c with it.
    Here all `weight_i` are 1, as they are with clients of equal sizes. It would be a coefficient of each client's own
    in the correction of a step, where methods have one for all clients, and its stationary point would be that of the
    objective weighted by sizes; FedDyn and SCAFFOLD, whose programs have the same scaling, are uniform here, too.

    The first round is FedDyn's bit for bit. `alpha = 0` is neither FedAvg nor SCAFFOLD: the server still shifts.
    """

    own = ("drift", "control")
    server = ("drift", "control")
    broadcast = ("control",)

    def __init__(self, alpha: float) -> None:
        super().__init__(alpha)
        self.proximal = False  # see effective_steps

    def begin(self, vectors: LocalVectors, client: Client) -> None:
        torch.sub(vectors.received["control"], vectors.own["control"], out=vectors.constant)
        vectors.constant.add_(vectors.own["drift"], alpha=self.alpha)

    def end(self, vectors: LocalVectors, update: Tensor, client: Client) -> None:
        super().end(vectors, update, client)
        renew_client_control(vectors, update, client)

    def effective_steps(self, num_steps: int, lr: float, momentum: float) -> float:
        """The controls count plain steps: the pull's gradient is to be part of `c_i`, so it is not divided out."""
        return LocalAlgorithm.effective_steps(self, num_steps, lr, momentum)

    def server_step(self, cohort: Cohort, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        renew_server_control(cohort, state["control"])
        return super().server_step(cohort, direction, state)
