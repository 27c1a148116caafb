"""The spec's toy federation, and a client's round on it without models, ranks or an executor.

Two clients with gradients `A_i (w - b_i)`: A_1 = diag(1, 2), b_1 = (1, 0), A_2 = diag(3, 1), b_2 = (0, 2); start
(1, 1), lr 0.1, two steps. The common optimum is (0.25, 2/3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.step import LocalMethods, local_step
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.core.parameters import Segment
from tests.reference import dense_cohort

F64 = torch.float64
CURVATURES = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=F64)
CENTRES = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=F64)
START = torch.tensor([1.0, 1.0], dtype=F64)
OPTIMUM = torch.tensor([0.25, 2 / 3], dtype=F64)

Gradient = Callable[[Tensor], Tensor]


def toy(client: int) -> Gradient:
    return lambda w: CURVATURES[client] * (w - CENTRES[client])


@dataclass
class Trained:
    """What a client's round leaves; everything `[..., P]`."""

    parameters: Tensor
    update: Tensor
    own: dict[str, Tensor]
    uploads: dict[str, Tensor]


def train(
    algorithm: LocalAlgorithm,
    gradient: Gradient,
    theta: Tensor = START,  # [P]
    num_steps: int = 2,
    *,
    lr: float = 0.1,
    sgd: LocalSgd | None = None,
    own: Mapping[str, Tensor] | None = None,  # zeros where not given
    received: Mapping[str, Tensor] | None = None,
    num_clients: int | None = None,  # train that many at once, as [C, P]
    segments: Sequence[Segment] = (),
    filtered: Callable[[Tensor], None] = lambda gradient: None,
) -> Trained:
    """A client's round, with the hooks called as `LocalAlgorithm` says."""
    sgd = sgd or LocalSgd()
    shape = theta.shape if num_clients is None else (num_clients, *theta.shape)

    def zeros() -> Tensor:
        return torch.zeros(shape, dtype=theta.dtype, device=theta.device)

    vectors = LocalVectors(
        zeros().copy_(theta),
        zeros(),
        theta.clone(),
        zeros(),
        zeros(),
        {name: zeros().copy_((own or {}).get(name, zeros())) for name in algorithm.own},
        {name: (received or {}).get(name, torch.zeros_like(theta)).clone() for name in algorithm.broadcast},
        {name: zeros() for name in algorithm.uploads},
    )
    client = Client(
        ids=range(num_clients or 1),
        round_index=0,
        seed=0,
        task_loss=cross_entropy,
        loss=lambda model, inputs, labels: cross_entropy(model(inputs), labels),
        lr=lr,
        num_steps=num_steps,
        effective_steps=algorithm.effective_steps(num_steps, lr, sgd.momentum),
        class_counts=torch.ones(2, dtype=torch.int64),
        filter=filtered,
        full_gradient=lambda out: out.copy_(gradient(vectors.parameters)),
    )
    state = sgd.initial_state(vectors.parameters)
    methods = LocalMethods(_Kept(filtered), algorithm, sgd)
    algorithm.bind(segments)
    algorithm.begin(vectors, client)
    for _ in range(num_steps):
        algorithm.gradient(vectors, lambda: vectors.gradient.copy_(gradient(vectors.parameters)), client)
        local_step(methods, vectors, state, lr)
    update = vectors.parameters - theta
    algorithm.end(vectors, update, client)
    return Trained(vectors.parameters, update, dict(vectors.own), dict(vectors.uploads))


@dataclass
class _Kept:
    """A filter made of a function."""

    function: Callable[[Tensor], None]

    def prepare(self, round_number: int, seed: int) -> None:
        pass

    def __call__(self, gradient: Tensor) -> None:
        self.function(gradient)


@dataclass
class Federation:
    """A whole federation in one process, uniform weights unless given; `play` is one round."""

    algorithm: LocalAlgorithm
    gradients: Sequence[Gradient] = (toy(0), toy(1))
    theta: Tensor = field(default_factory=START.clone)
    sgd: LocalSgd = field(default_factory=LocalSgd)

    def __post_init__(self) -> None:
        zeros = torch.zeros_like(self.theta)
        self.own = [{name: zeros.clone() for name in self.algorithm.own} for _ in self.gradients]
        self.state = {name: zeros.clone() for name in self.algorithm.server}

    def play(
        self,
        participants: Sequence[int] | None = None,
        *,
        num_steps: int | Sequence[int] = 2,
        lr: float = 0.1,
        weights: Sequence[float] | None = None,
    ) -> list[Trained]:
        clients = list(range(len(self.gradients))) if participants is None else list(participants)
        steps = [num_steps] * len(clients) if isinstance(num_steps, int) else list(num_steps)
        received = {name: self.state[name] for name in self.algorithm.broadcast}
        results = [
            train(
                self.algorithm,
                self.gradients[k],
                self.theta,
                n,
                lr=lr,
                sgd=self.sgd,
                own=self.own[k],
                received=received,
            )
            for k, n in zip(clients, steps, strict=True)
        ]
        for k, result in zip(clients, results, strict=True):
            self.own[k] = result.own
        updates = torch.stack([result.update for result in results])
        cohort = dense_cohort(
            updates,
            self.theta,
            num_steps=steps,
            effective_steps=[self.algorithm.effective_steps(n, lr, self.sgd.momentum) for n in steps],
            lr=lr,
            population=len(self.gradients),
            ids=clients,
            weights=weights,
            uploads={name: torch.stack([r.uploads[name] for r in results]) for name in self.algorithm.uploads},
        )
        direction = cohort.updates.combine(cohort.weights)
        self.theta = self.theta + self.algorithm.server_step(cohort, direction, self.state)
        return results


class Echo(nn.Module):
    """A model whose features are its inputs, and so are its outputs and its only level; frozen, it gives `features`."""

    def __init__(self, features: Tensor | None = None) -> None:
        super().__init__()
        self.features = features

    def represent(self, images: Tensor, levels: list[Tensor] | None = None) -> Tensor:
        if levels is not None:
            levels.append(images)
        return images if self.features is None else self.features

    def classify(self, features: Tensor) -> Tensor:
        return features

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.represent(images))


def a_client(**changes: object) -> Client:
    """For a loss: what is not given is of no consequence."""
    given = {
        "ids": (0,),
        "round_index": 0,
        "seed": 0,
        "lr": 0.1,
        "num_steps": 1,
        "effective_steps": 1.0,
        "class_counts": torch.ones(2, dtype=torch.int64),
    }
    losses = {"task_loss": cross_entropy, "loss": lambda model, inputs, labels: cross_entropy(model(inputs), labels)}
    return Client(**{**losses, **given, **changes})  # type: ignore[arg-type]
