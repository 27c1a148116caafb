"""FedLAW: weights and shrinking learned on samples of the server's own."""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor

from fedspec_dist.core.cohort import Cohort
from fedspec_dist.server.distances import inner
from fedspec_dist.server.protocols import Weights

_BETAS = (0.5, 0.999)
_DECAY_EVERY, _DECAY = 20, 0.5


class FedLaw:
    """`x [K]` and `g` of the next model `exp(g) sum_k softmax(x)_k y_k` are learned on the server's samples.

    In every round anew, from `x_k = log(n_k / sum_j n_j)` and `g = 0`, by Adam (betas 0.5 and 0.999) on the mean loss
    of batches, its rate halved after every 20 epochs. With the gradient `d` of the loss at the model, by the chain rule

        dL/dlambda_k = exp(g) (u_k . d)        lambda = softmax(x), u_k = y_k - theta
        dL/dx_k      = lambda_k (dL/dlambda_k - sum_j lambda_j dL/dlambda_j)
        dL/dg        = exp(g) (theta . d) + sum_k lambda_k dL/dlambda_k

    (`theta . d` belongs to `dL/dlambda_k` too, and cancels in `dL/dx` since `lambda` sums to 1). `epochs = 0` is
    `samples`, bit for bit. One client: weight 1, and only `g` is learned, so this is not FedAvg.

    The samples are a share `proxy_fraction` of the test set that is not tested on, in batches of `batch_size`. Released
    with rate 0.01 for CIFAR-10, else 0.005. Its variants with squares in place of exponentials and with `x` and `g`
    learned one after the other are left out.

    Diagnostics: `fedlaw/shrink`, that is `exp(g)`.

    Z. Li, T. Lin, X. Shang, C. Wu, "Revisiting Weighted Aggregation in Federated Learning with Neural Networks",
    ICML 2023, and its released program.
    """

    def __init__(self, epochs: int, lr: float, batch_size: int, proxy_fraction: float) -> None:
        self.epochs, self.lr, self.batch_size, self.proxy_fraction = epochs, lr, batch_size, proxy_fraction

    def initial_state(self, num_samples: Tensor) -> dict[str, Tensor]:
        """None: every round starts from the shares of the samples."""
        return {}

    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        shares = cohort.clients.shares
        if not self.epochs:
            return Weights(shares, diagnostics={"fedlaw/shrink": 1.0})
        proxy = cohort.proxy
        assert proxy is not None, "fedlaw needs samples of the server's own; the round has none"
        x, g = shares.log(), shares.new_zeros(())
        optimizer = torch.optim.Adam([x, g], lr=self.lr, betas=_BETAS)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, _DECAY_EVERY, _DECAY)
        for epoch in range(self.epochs):
            for batch in proxy.batches(epoch):
                shrink = exp(float(g))
                gradient = proxy.gradient(merged(cohort, x.softmax(0), shrink), batch)
                x.grad, g.grad = gradients(cohort, x.softmax(0), shrink, gradient)
                optimizer.step()
            schedule.step()
        shrink = exp(float(g))
        return Weights(x.softmax(0), shrink, {"fedlaw/shrink": shrink})


def merged(cohort: Cohort, w: Tensor, shrink: float) -> Tensor:
    """`shrink * (theta + sum_k w_k u_k)`, `[P]`, in the dtype of theta; `w [K]` sums to 1."""
    update = cohort.slicing.whole(cohort.updates.combine(w))
    return (shrink * (cohort.theta.double() + update)).to(cohort.theta.dtype)


def gradients(cohort: Cohort, w: Tensor, shrink: float, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """`dL/dx [K]` and `dL/dg []` from `dL/dmodel [P]`: the formulas at `FedLaw`, with `w = softmax(x)`."""
    along = shrink * cohort.updates.dot(cohort.slicing.slice(gradient))
    mean = (w * along).sum()
    return w * (along - mean), shrink * inner(cohort.theta, gradient) + mean
