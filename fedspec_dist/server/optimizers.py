"""Server optimizers: from the aggregated direction to the next parameters, slice by slice.

The direction points downhill, so it is added. Arithmetic and state are float64; the parameters are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Sgd:
    """`theta + lr * direction`. `lr = 1` with the weighted mean of the updates is FedAvg.

    Reddi et al., "Adaptive Federated Optimization", 2021, algorithm 1 with SGD as the server optimizer.
    """

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        """None."""
        return {}

    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        return (theta.to(torch.float64) + self.lr * direction).to(theta.dtype)


class Momentum:
    """FedAvgM: `v <- beta v + direction`, then `theta + lr * v`, from `v = 0`.

    `beta = 0` is `Sgd`, bit for bit. A direction of zero still moves the model, by `lr beta v`. MOON's and FedDecorr's
    form, with `(1 - beta)` before the direction, is this one with that factor in `lr`.

    T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, section 4.3 (number from memory).
    """

    def __init__(self, lr: float, beta: float) -> None:
        self.lr, self.beta = lr, beta

    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        """`momentum`, that is `v`."""
        return {"momentum": torch.zeros(num_columns, dtype=torch.float64)}

    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        velocity = state["momentum"].mul_(self.beta).add_(direction)
        return (theta.to(torch.float64) + self.lr * velocity).to(theta.dtype)


class Adaptive:
    """What FedAdagrad, FedAdam and FedYogi share; each says how `v` grows, from the square of the direction `d`.

        m <- beta1 m + (1 - beta1) d        theta + lr * m / (sqrt(v) + tau)

    From `m = 0` and `v = initial_accumulator`; null is `tau^2`, the least that the paper allows (from memory); the
    programs of Flower, FL-bench and FedDecorr have 0. No correction of the bias of `m` and `v` (from memory; Flower's
    FedAdam has one). A direction of zero at the start does not move the model, later it does, by what `m` remembers.
    No setting is FedAvg, but for Adam with `beta1 = 0`, `beta2 = 1`, `initial_accumulator = 0` and `lr = tau`, up to
    rounding.

    S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2. The default rates are those of Flower's
    reproduction of its CIFAR-10 experiment.
    """

    def __init__(self, lr: float, beta1: float, tau: float, initial_accumulator: float | None) -> None:
        start = tau**2 if initial_accumulator is None else initial_accumulator
        self.lr, self.beta1, self.tau, self.initial_accumulator = lr, beta1, tau, start

    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        """`mean` and `square`, that is `m` and `v`."""
        mean = torch.zeros(num_columns, dtype=torch.float64)
        return {"mean": mean, "square": torch.full_like(mean, self.initial_accumulator)}

    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        m, v = state["mean"], state["square"]
        m.mul_(self.beta1).add_(direction, alpha=1 - self.beta1)
        self.accumulate(v, direction.square())
        return (theta.to(torch.float64) + self.lr * m / (v.sqrt() + self.tau)).to(theta.dtype)

    def accumulate(self, v: Tensor, square: Tensor) -> None:
        """Change `v [n]` in place, given `square = direction^2`, `[n]`."""
        raise NotImplementedError


class Adagrad(Adaptive):
    """FedAdagrad: `v <- v + d^2`."""

    def accumulate(self, v: Tensor, square: Tensor) -> None:
        v.add_(square)


class _Decaying(Adaptive):
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        tau: float,
        initial_accumulator: float | None,
    ) -> None:
        super().__init__(lr, beta1, tau, initial_accumulator)
        self.beta2 = beta2


class Adam(_Decaying):
    """FedAdam: `v <- beta2 v + (1 - beta2) d^2`."""

    def accumulate(self, v: Tensor, square: Tensor) -> None:
        v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)


class Yogi(_Decaying):
    """FedYogi: `v <- v - (1 - beta2) d^2 sign(v - d^2)`."""

    def accumulate(self, v: Tensor, square: Tensor) -> None:
        v.sub_(square * (v - square).sign(), alpha=1 - self.beta2)
