"""What a local method may do, and what it is told. Every method of the base class does nothing: that is FedAvg."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedspec_dist.clients.vectors import LocalVectors, Uploads
from fedspec_dist.core import seeding
from fedspec_dist.core.batch import Inputs
from fedspec_dist.core.cohort import Cohort
from fedspec_dist.core.parameters import Segment


@dataclass(frozen=True)
class Client:
    """The client at work, as far as its method may know it; or C clients at once, whose numbers are `[C, 1]`."""

    ids: Sequence[int]  # one, or C
    round_index: int  # from 0, over all phases
    seed: int  # of the run
    task_loss: Callable[[Tensor, Tensor], Tensor]  # outputs [B, ...], targets [B, ...] -> the mean loss
    loss: Callable[[Any, Inputs, Tensor | None], Tensor]  # model, inputs, targets -> the same, of any task
    lr: float  # of this round
    num_steps: int | Tensor  # of this round
    effective_steps: float | Tensor  # see `LocalAlgorithm.effective_steps`
    class_counts: Tensor  # [num_classes] or [C, num_classes], int64, of its training samples, on the device
    is_new: bool | Tensor = True  # it has nothing of its own yet: no round to which it reported came before
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)  # the model at other parameters, not differentiated
    filter: Callable[[Tensor], None] | None = None  # the gradient filter, in place on a vector [..., P]
    full_gradient: Callable[[Tensor], None] | None = None  # writes the filtered mean gradient over all its data, at y

    @property
    def distance(self) -> float | Tensor:
        """`lr * effective_steps`: `-update / distance` is the mean gradient that the client followed."""
        return self.lr * self.effective_steps

    @property
    def id(self) -> int:
        """Its number, from 0.

        Raises:
            ValueError: several are trained at once, and whoever asks is not in their loss.
        """
        if len(self.ids) > 1:
            raise ValueError(
                "runtime.executor: got 'batched', but the local method asks for the id or the draws of one client "
                "outside its loss; allowed: sequential"
            )
        return self.ids[0]

    def generator(self, purpose: str = "") -> torch.Generator:
        """Draws on the CPU that are the same on every rank, keyed by seed, client, round and purpose.

        Each call starts it anew: draws that are to differ within a round need different purposes.
        """
        name = f"local method {purpose}"
        return torch.Generator().manual_seed(seeding.torch_seed(self.seed, name, self.round_index, self.id))


class LocalAlgorithm:
    """A local method. A client's round is, with the hooks in capitals,

        BEGIN
        for each batch:  GRADIENT (of the LOSS);  filter;  CORRECT;  clip, weight decay, step
        update = y - theta
        END

    and once all have reported, the server calls SERVER_STEP.
    """

    own: tuple[str, ...] = ()  # vectors a client keeps from one participation to the next; zeros at first
    server: tuple[str, ...] = ()  # vectors the server keeps; zeros at first
    broadcast: tuple[str, ...] = ()  # those of `server` that the clients receive with the model
    # Vectors a client sends beside its update. `{"features": 64}` names a short one: the server's methods have those of
    # all clients as a tensor `cohort.uploads["features"] [K, 64]`.
    uploads: Uploads = ()
    frozen_at: tuple[str, ...] = ()  # the model is also wanted at these: `anchor`, or a name in `own`
    needs_levels: bool = False  # the features that it needs are the backbone's stages, before any projection head
    needs_full_gradient: bool = False  # `begin` calls `client.full_gradient`: another pass over all the data
    passes: float = 1.0  # forward and backward passes a step, for the balance between ranks
    proximal: bool = False  # pulls towards the anchor, and `effective_steps` accounts for it

    def bind(self, segments: Sequence[Segment]) -> None:
        """Called once: where each parameter tensor lies in the vectors."""

    def begin(self, vectors: LocalVectors, client: Client) -> None:
        """`parameters` and `anchor` are the global model; `own`, `received` are in place."""

    def gradient(self, vectors: LocalVectors, backward: Callable[[], None], client: Client) -> None:
        """Fill `vectors.gradient`; `backward` does so with the current batch's gradient at `vectors.parameters`."""
        backward()

    def loss(self, model: Any, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        """The scalar that is differentiated; `model` has the client's own parameters."""
        return client.loss(model, inputs, labels)

    def correct(self, vectors: LocalVectors) -> None:
        """Change the filtered gradient of a step, in place."""

    def end(self, vectors: LocalVectors, update: Tensor, client: Client) -> None:
        """Write what the client keeps into `own`, what it sends into `uploads`; `update [..., P]` is `y - theta`."""

    def effective_steps(self, num_steps: int, lr: float, momentum: float) -> float:
        """`a` such that a constant gradient g gives the update `-lr * a * g` after `num_steps` steps.

        With momentum rho, `a = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho)`: J. Wang, Q. Liu, H. Liang, G. Joshi,
        H. V. Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020.
        """
        if not momentum:
            return float(num_steps)
        return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)

    def server_step(self, cohort: Cohort, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The slice of the direction in which the server steps, from the aggregated one; both float64.

        `state` has this rank's slices of the vectors in `server`, changed in place.
        """
        return direction


class FedAvg(LocalAlgorithm):
    """Plain local SGD: the step follows the data gradient.

    H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep
    Networks from Decentralized Data", 2017, algorithm 1.
    """
