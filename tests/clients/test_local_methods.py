"""The shared table of local methods: a row for each, with numbers worked out by hand, and what holds for all.

Methods that change the step are worked out on the toy federation of `harness`, those that change the loss on a model
whose outputs are its inputs. What is particular to a method is tested in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import cos, log, pi, sin

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedspec_dist.clients.algorithms.base import Client, FedAvg, LocalAlgorithm
from fedspec_dist.clients.algorithms.controls import FedDC
from fedspec_dist.clients.algorithms.losses import FedDecorr
from fedspec_dist.clients.algorithms.proximal import FedDyn, FedNova, FedProx
from fedspec_dist.clients.algorithms.sharpness import FedCM
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.config.methods import LOCAL_ALGORITHMS
from fedspec_dist.core.parameters import Segment
from tests.clients.harness import CENTRES, CURVATURES, F64, START, Echo, Federation, a_client, toy, train

Point = tuple[float, float]


@dataclass(frozen=True)
class Stepping:
    """A method that changes the step. `rounds` has the two clients' models and the next global one."""

    algorithm: Callable[[], LocalAlgorithm]
    rounds: list[tuple[Point, Point, Point]]
    num_steps: int = 2
    neutral: Callable[[], LocalAlgorithm] | None = None  # the setting that is FedAvg bit for bit
    passes: float = 1  # forward and backward, of a step


STEPPING = {
    "fedavg": Stepping(FedAvg, [((1, 0.64), (0.49, 1.19), (0.745, 0.915))], neutral=FedAvg),
    "fedprox": Stepping(
        lambda: FedProx(mu=1.0), [((1, 0.66), (0.52, 1.18), (0.76, 0.92))], neutral=lambda: FedProx(mu=0.0)
    ),
    "fednova": Stepping(
        lambda: FedNova(mu=1.0), [((1, 0.66), (0.52, 1.18), (0.76, 0.92))], neutral=lambda: FedNova(mu=0.0)
    ),
    "scaffold": Stepping(
        LOCAL_ALGORITHMS["scaffold"].build,
        [
            ((1, 0.64), (0.49, 1.19), (0.745, 0.915)),
            ((0.5512, 0.8331), (0.5818, 0.8599), (0.5665, 0.8465)),
        ],
    ),
    "feddyn": Stepping(
        lambda: FedDyn(alpha=0.5),
        [
            ((1, 0.65), (0.505, 1.185), (0.505, 0.835)),
            ((0.596575, 0.573375), (0.2958625, 1.0334125), (0.1399375, 0.6892875)),
        ],
    ),
    "feddc": Stepping(
        lambda: FedDC(alpha=0.5),
        [
            ((1, 0.65), (0.505, 1.185), (0.505, 0.835)),
            ((0.3676375, 0.8074375), (0.50005, 0.785975), (0.1151875, 0.6759125)),
        ],
    ),
    "fedcm": Stepping(
        lambda: FedCM(alpha=0.5),
        [
            ((1, 0.81), (0.7225, 1.0975), (0.86125, 0.95375)),
            ((0.8071375, 0.75056875), (0.55808125, 1.0332125), (0.682609375, 0.891890625)),
        ],
        neutral=lambda: FedCM(alpha=1.0),
    ),
    "fedsam": Stepping(
        lambda: LOCAL_ALGORITHMS["fedsam"].build(rho=0.5),
        [((1, 0.7), (0.5576975053, 1.1158113883), (0.7788487526, 0.9079056942))],
        num_steps=1,
        neutral=lambda: LOCAL_ALGORITHMS["fedsam"].build(rho=0.0),
        passes=2,
    ),
    "mofedsam": Stepping(
        lambda: LOCAL_ALGORITHMS["mofedsam"].build(alpha=0.5, rho=0.5),
        [((1, 0.85), (0.7788487526, 1.0579056942), (0.8894243763, 0.9539528471))],
        num_steps=1,
        neutral=lambda: LOCAL_ALGORITHMS["mofedsam"].build(alpha=1.0, rho=0.0),
        passes=2,
    ),
}


def _at_degrees(*angles: float) -> Tensor:
    return torch.tensor([[cos(pi * a / 180), sin(pi * a / 180)] for a in angles], dtype=F64)


@dataclass(frozen=True)
class Losing:
    """A method that changes the loss. `difference` is to the task's loss, for outputs equal to `inputs`."""

    algorithm: Callable[[], LocalAlgorithm]
    inputs: Tensor
    labels: list[int]
    difference: float
    neutral: Callable[[], LocalAlgorithm]
    class_counts: tuple[int, ...] = (1, 1)
    z_global: Point = (1.0, 0.0)
    z_previous: Point = (0.0, 1.0)
    passes: float = 1

    def client(self) -> Client:
        frozen = {name: Echo(self._copies(z)) for name, z in self.frozen().items()}
        return a_client(class_counts=torch.tensor(self.class_counts), is_new=False, frozen=frozen)

    def frozen(self) -> dict[str, Point]:
        return {"anchor": self.z_global, "previous": self.z_previous}

    def _copies(self, z: Point) -> Tensor:
        return torch.tensor(z, dtype=F64).repeat(len(self.inputs), 1)


LOSING = {
    "fedlc": Losing(
        lambda: LOCAL_ALGORITHMS["fedlc"].build(tau=1.0),
        torch.ones(1, 2, dtype=F64),
        [0],
        0.7799487248 - log(2),
        neutral=lambda: LOCAL_ALGORITHMS["fedlc"].build(tau=0.0),
        class_counts=(16, 81),
    ),
    "feddecorr": Losing(
        lambda: FedDecorr(beta=1.0),
        torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]], dtype=F64),
        [0, 1, 1],
        0.3333333267,
        neutral=lambda: FedDecorr(beta=0.0),
    ),
    "moon": Losing(
        lambda: LOCAL_ALGORITHMS["moon"].build(mu=1.0),
        torch.tensor([[1.0, 0.0]], dtype=F64),
        [1],
        0.1269280110,
        neutral=lambda: LOCAL_ALGORITHMS["moon"].build(mu=0.0),
        passes=5 / 3,  # three forward passes and one backward, which costs two
    ),
    "fedrcl": Losing(
        LOCAL_ALGORITHMS["fedrcl"].build,
        _at_degrees(0, 30, 90, 180),
        [0, 0, 1, 1],
        2.5001881162 + 0.0331737537,
        neutral=lambda: LOCAL_ALGORITHMS["fedrcl"].build(contrast_weight=0.0, relaxation_weight=0.0),
    ),
}
ROWS: dict[str, Stepping | Losing] = {**STEPPING, **LOSING}
EVERY = {name: row.algorithm for name, row in ROWS.items()}
SEGMENTS = (Segment("fc.weight", (1,), 0, 1), Segment("fc.bias", (1,), 1, 1))


def test_every_method_of_the_program_is_in_this_table() -> None:
    assert EVERY.keys() == LOCAL_ALGORITHMS.keys()
    for name, make in EVERY.items():
        assert isinstance(make(), LOCAL_ALGORITHMS[name].load())


@pytest.mark.parametrize("name", STEPPING)
def test_rounds_by_hand(name: str) -> None:
    row = STEPPING[name]
    federation = Federation(row.algorithm())
    for first, second, after in row.rounds:
        trained = federation.play(num_steps=row.num_steps)
        assert trained[0].parameters.tolist() == pytest.approx(first, abs=1e-9)
        assert trained[1].parameters.tolist() == pytest.approx(second, abs=1e-9)
        assert federation.theta.tolist() == pytest.approx(after, abs=1e-9)


@pytest.mark.parametrize("name", LOSING)
def test_losses_by_hand(name: str) -> None:
    row = LOSING[name]
    labels = torch.tensor(row.labels)
    loss = row.algorithm().loss(Echo(), row.inputs, labels, row.client())
    assert float(loss - cross_entropy(row.inputs, labels)) == pytest.approx(row.difference, abs=1e-9)


def _vectors(algorithm: LocalAlgorithm, seed: int, num_clients: int = 2) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random contents for `own [C, P]` and `received [P]`."""
    draw = torch.Generator().manual_seed(seed)
    own = {name: torch.randn(num_clients, 2, generator=draw, dtype=F64) for name in algorithm.own}
    return own, {name: torch.randn(2, generator=draw, dtype=F64) for name in algorithm.broadcast}


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_of_clients_is_each_client_alone(name: str) -> None:
    algorithm = EVERY[name]()
    own, received = _vectors(algorithm, 1)
    sgd = LocalSgd(momentum=0.9, weight_decay=0.01, clip_norm=0.5)
    both = train(
        algorithm,
        lambda w: CURVATURES * (w - CENTRES),
        START,
        5,
        sgd=sgd,
        own=own,
        received=received,
        num_clients=2,
        segments=SEGMENTS,
    )
    for client in range(2):
        mine = {key: vectors[client] for key, vectors in own.items()}
        alone = train(algorithm, toy(client), START, 5, sgd=sgd, own=mine, received=received, segments=SEGMENTS)
        torch.testing.assert_close(both.parameters[client], alone.parameters)
        torch.testing.assert_close({k: v[client] for k, v in both.own.items()}, alone.own)
        torch.testing.assert_close({k: v[client] for k, v in both.uploads.items()}, alone.uploads)


@pytest.mark.parametrize("name", EVERY)
def test_float32_keeps_its_dtype_and_is_near_float64(name: str) -> None:
    algorithm = EVERY[name]()
    own, received = _vectors(algorithm, 2, num_clients=1)
    exact = train(algorithm, toy(0), own={k: v[0] for k, v in own.items()}, received=received)
    rounded = train(
        algorithm,
        lambda w: CURVATURES[0].float() * (w - CENTRES[0].float()),
        START.float(),
        own={k: v[0].float() for k, v in own.items()},
        received={k: v.float() for k, v in received.items()},
    )
    pairs = [(rounded.own[key], exact.own[key]) for key in exact.own]
    for result, expected in [(rounded.parameters, exact.parameters), *pairs]:
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, row in STEPPING.items() if row.neutral])
def test_the_neutral_setting_steps_like_fedavg_bit_for_bit(name: str) -> None:
    make = STEPPING[name].neutral
    assert make is not None
    algorithm = make()
    sgd = LocalSgd(momentum=0.5, weight_decay=0.01)
    received = {key: torch.full((2,), torch.nan, dtype=F64) for key in algorithm.broadcast}  # not to be looked at
    ours = train(algorithm, toy(1), START / 3, 5, sgd=sgd, received=received)
    assert torch.equal(ours.parameters, train(FedAvg(), toy(1), START / 3, 5, sgd=sgd).parameters)
    assert algorithm.passes == 1
    assert not algorithm.proximal


@pytest.mark.parametrize("name", LOSING)
def test_the_neutral_setting_has_the_tasks_loss_bit_for_bit(name: str) -> None:
    row = LOSING[name]
    labels = torch.tensor(row.labels)
    client = replace(row.client(), frozen={})  # nor are these looked at
    loss = row.neutral().loss(Echo(), row.inputs, labels, client)
    assert torch.equal(loss, cross_entropy(row.inputs, labels))


@pytest.mark.parametrize("name", LOSING)
def test_a_changed_loss_leaves_the_step_alone(name: str) -> None:
    assert torch.equal(train(EVERY[name](), toy(1)).parameters, train(FedAvg(), toy(1)).parameters)


@pytest.mark.parametrize("name", LOSING)
def test_gradients_of_the_losses_are_those_of_finite_differences(name: str) -> None:
    row = LOSING[name]
    draw = torch.Generator().manual_seed(4)
    inputs = (row.inputs + 0.05 * torch.randn(row.inputs.shape, generator=draw, dtype=F64)).requires_grad_()
    algorithm, labels, client = row.algorithm(), torch.tensor(row.labels), row.client()
    assert torch.autograd.gradcheck(lambda x: algorithm.loss(Echo(), x, labels, client), (inputs,))


@pytest.mark.parametrize("name", STEPPING)
def test_steps_ask_nothing_of_the_device(name: str) -> None:
    """Meta tensors have no values: looking at one, which on a GPU would wait for it, is an error."""
    algorithm = STEPPING[name].algorithm()
    trained = train(algorithm, lambda w: w * 2, torch.ones(2, device="meta"), segments=SEGMENTS)
    assert trained.parameters.is_meta
    if name == "fedsam":
        train(
            LOCAL_ALGORITHMS["fedsam"].build(adaptive=True),
            lambda w: w * 2,
            torch.ones(2, device="meta"),
            segments=SEGMENTS,
        )


@pytest.mark.parametrize("name", [*LOSING, "fedlc_others"])
def test_losses_ask_nothing_of_the_device(name: str) -> None:
    algorithm = LOCAL_ALGORITHMS["fedlc"].build(denominator="others") if name == "fedlc_others" else EVERY[name]()
    inputs = torch.ones(4, 2, device="meta", requires_grad=True)
    labels = torch.zeros(4, dtype=torch.int64, device="meta")
    counts = torch.ones(2, dtype=torch.int64, device="meta")
    frozen = {"anchor": Echo(), "previous": Echo()}
    client = a_client(class_counts=counts, is_new=False, frozen=frozen)
    algorithm.loss(Echo(), inputs, labels, client).backward()
    assert inputs.grad is not None


@pytest.mark.parametrize("name", ROWS)
def test_passes_are_the_relative_cost_of_a_step(name: str) -> None:
    assert EVERY[name]().passes == pytest.approx(ROWS[name].passes)


@pytest.mark.parametrize("name", STEPPING)
def test_passes_of_a_changed_step_are_the_gradients_it_asks_for(name: str) -> None:
    asked: list[Tensor] = []

    def gradient(w: Tensor) -> Tensor:
        asked.append(w)
        return toy(0)(w)

    train(STEPPING[name].algorithm(), gradient, num_steps=5)
    assert len(asked) == 5 * STEPPING[name].passes


@pytest.mark.parametrize("name", EVERY)
def test_what_lies_where_is_stated_consistently(name: str) -> None:
    algorithm = EVERY[name]()
    assert set(algorithm.broadcast) <= set(algorithm.server)
    assert set(algorithm.frozen_at) <= {"anchor", *algorithm.own}
    assert "features" in LOCAL_ALGORITHMS[name].needs or not algorithm.needs_levels


class _Outputs(torch.nn.Module):
    """A model that is asked for its outputs only."""

    def forward(self, images: Tensor) -> Tensor:
        return images


@pytest.mark.parametrize("name", LOSING)
def test_who_asks_the_model_for_more_than_outputs_says_so(name: str) -> None:
    row, algorithm = LOSING[name], EVERY[name]()
    labels = torch.tensor(row.labels)
    if "features" in LOCAL_ALGORITHMS[name].needs:
        with pytest.raises(AttributeError, match=r"has no attribute '(represent|classify)'"):
            algorithm.loss(_Outputs(), row.inputs, labels, row.client())
    else:
        algorithm.loss(_Outputs(), row.inputs, labels, row.client())


def test_vectors_are_those_that_the_executor_allocates() -> None:
    vectors = LocalVectors.allocate(3, torch.device("cpu"), own=("a",), received=("b",), uploads=("c",))
    everything = [vectors.parameters, vectors.gradient, vectors.anchor, vectors.scratch, vectors.constant]
    everything += [vectors.own["a"], vectors.received["b"], vectors.uploads["c"]]
    assert len({vector.data_ptr() for vector in everything}) == 8
    assert all(torch.equal(vector, torch.zeros(3)) for vector in everything)
