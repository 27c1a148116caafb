"""Control variates, which take the clients' drift out of their steps: SCAFFOLD, and FedDC."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.algorithms.proximal import FedDyn
from fedspec_dist.clients.vectors import LocalVectors, add_scaled
from fedspec_dist.core.cohort import Cohort


class Scaffold(LocalAlgorithm):
    """Control variates take the clients' drift out of their steps.

    Every step follows `g + (c - c_i)`, with the client's control `c_i` and the server's `c`, both 0 at first.

    After the local steps, with `D_i = y_i - theta` and the effective steps `a_i`

        option 2:   c_i <- c_i - c - D_i / (lr a_i)
        option 1:   c_i <- gradient of f_i at theta, over all its data

    and on the server, over the m clients of N that took part, whatever their weights in the model

        c <- c + 1/N sum (c_i_new - c_i_old)

    The controls are means over clients, so the fixed point is that of the uniform objective, whatever the weights of
    the model: `server.weights=uniform` is the paper's setting.

    In option 2 the increment does not contain `c_i`, so the server works it out from the updates alone, and nothing
    but them is sent. There `c_i` also holds what weight decay and clipping did; in option 1 it is the filtered
    gradient of the data only. (Option 1 is as the paper is remembered: no program that was read has it.)

    The first round is FedAvg bit for bit. So are all with a single client, in option 1 up to rounding, since an
    increment is rounded before it is sent. With one local step of all clients, the corrections cancel in the uniform
    mean. An update of zero leaves `c_i - c`.

    S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled
    Averaging for Federated Learning", ICML 2020, algorithm 1.
    """

    own = ("control",)
    server = ("control",)
    broadcast = ("control",)

    def __init__(self, option: int) -> None:
        self.option = option
        self.needs_full_gradient = option == 1
        self.uploads = ("increment",) if option == 1 else ()

    def begin(self, vectors: LocalVectors, client: Client) -> None:
        # As one vector: g - c_i + c would not be exactly g where c = c_i.
        torch.sub(vectors.received["control"], vectors.own["control"], out=vectors.constant)
        if self.option == 1:
            assert client.full_gradient is not None
            client.full_gradient(vectors.uploads["increment"])

    def correct(self, vectors: LocalVectors) -> None:
        vectors.gradient.add_(vectors.constant)

    def end(self, vectors: LocalVectors, update: Tensor, client: Client) -> None:
        if self.option == 1:
            gradient = vectors.scratch.copy_(vectors.uploads["increment"])
            vectors.uploads["increment"].sub_(vectors.own["control"])
            vectors.own["control"].copy_(gradient)
        else:
            renew_client_control(vectors, update, client)

    def server_step(self, cohort: Cohort, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        control = state["control"]
        if self.option == 1:
            increments = cohort.rows("increment")
            share = torch.full((increments.num_rows,), 1 / cohort.clients.population, dtype=torch.float64)
            control.copy_(control.double() + increments.combine(share))
        else:
            renew_server_control(cohort, control)
        return direction


def renew_client_control(vectors: LocalVectors, update: Tensor, client: Client) -> None:
    """`c_i <- c_i - c - D_i / (lr a_i)`, in place; `update [..., P]` is `D_i`."""
    control = vectors.own["control"].sub_(vectors.received["control"])
    # Rounded once from float64, like the server's: where a single client makes both, c_i and c are the same bits.
    control.copy_(add_scaled(control.double(), update, -1 / client.distance))


def renew_server_control(cohort: Cohort, control: Tensor) -> None:
    """`c <- (1 - m/N) c - 1/N sum D_i / (lr a_i)`, in place: `c + 1/N sum` of the clients' increments."""
    clients = cohort.clients
    gradients = cohort.updates.combine(-1 / (clients.population * clients.distances))
    control.copy_((1 - cohort.updates.num_rows / clients.population) * control.double() + gradients)


class FedDC(FedDyn):
    """Local drift decoupling and correction.

    FedDyn's drift `h_i` and server step together with SCAFFOLD's controls `c_i` and `c` (option 2).

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

    L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C.-Z. Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift
    Decoupling and Correction", CVPR 2022, in the form of the authors' program.
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
