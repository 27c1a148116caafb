"""The executor against an ordinary PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.one_client import FILTER_SEED, ROUND_INDEX, OneClient, work_of
from fedspec_dist.clients.algorithms.base import Client, FedAvg, LocalAlgorithm
from fedspec_dist.clients.executors.base import ClientWork
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.step import LocalMethods
from fedspec_dist.clients.vectors import LocalVectors
from fedspec_dist.config.methods import FILTERS, MODELS
from fedspec_dist.core.parameters import ParameterLayout, Segment
from fedspec_dist.filters.identity import Identity
from fedspec_dist.rounds.sampling import batch_bounds

IMAGES = torch.randn(23, 8, 8, 1, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)
LABELS = torch.arange(23) % 3


def _model() -> nn.Module:
    torch.manual_seed(1)
    return MODELS["cnn"].build((1, 8, 8), 3, width=4)


def _executor(
    module: nn.Module, ratio: float, momentum: float = 0.0, algorithm: LocalAlgorithm | None = None
) -> OneClient:
    layout = ParameterLayout(module)
    kept = FILTERS["rfft"].build(layout.segments, ratio) if ratio else Identity(layout.segments)
    local = LocalMethods(kept, algorithm or FedAvg(), LocalSgd(momentum, weight_decay=0.01, clip_norm=1.0))
    return OneClient(module, layout, local, IMAGES, LABELS)


def _work(num_samples: int, batch_size: int, epochs: int) -> ClientWork:
    orders = [torch.randperm(num_samples, generator=torch.Generator().manual_seed(e)) for e in range(epochs)]
    bounds = batch_bounds(num_samples, batch_size, epochs)
    return work_of(torch.arange(num_samples), torch.cat(orders), bounds, LABELS, 3)


def _numpy_high_pass(gradient: np.ndarray, ratio: float) -> np.ndarray:
    spectrum = np.fft.rfft(gradient.reshape(-1))
    spectrum[: int(ratio * len(spectrum) + 1e-9)] = 0
    return np.fft.irfft(spectrum, n=gradient.size).reshape(gradient.shape).astype(np.float32)


def _plain_loop(module: nn.Module, work: ClientWork, ratio: float, momentum: float) -> tuple[Tensor, float]:
    """The same steps with torch's optimizer, gradients filtered by numpy."""
    module = copy.deepcopy(module)
    start = torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    losses = 0.0
    for first, last in work.bounds:
        index = work.order[first:last]
        optimizer.zero_grad()
        loss = F.cross_entropy(module(IMAGES[index]), LABELS[index])
        loss.backward()
        losses += loss.item() * (last - first)
        for parameter in module.parameters():
            assert parameter.grad is not None
            if ratio:
                parameter.grad.copy_(torch.from_numpy(_numpy_high_pass(parameter.grad.numpy(), ratio)))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    end = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return end - start, losses / len(work.order)


@pytest.mark.parametrize(("ratio", "momentum"), [(0.0, 0.0), (0.0, 0.9), (0.1, 0.0)])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(23, 5), (3, 50), (11, 10)])
def test_the_executor_is_a_plain_loop(ratio: float, momentum: float, num_samples: int, batch_size: int) -> None:
    module = _model()
    work = _work(num_samples, batch_size, epochs=2)
    expected, expected_loss = _plain_loop(module, work, ratio, momentum)
    executor = _executor(module, ratio, momentum)
    theta = executor.vectors.parameters.clone()
    update = torch.empty_like(theta)
    loss, removed, largest = executor.train(work, theta, 0.1, update).tolist()
    torch.testing.assert_close(update, expected, rtol=1e-3, atol=2e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert largest == pytest.approx(float(expected.abs().max()), rel=1e-4)
    assert (removed > 0) == (ratio > 0)


def test_a_client_leaves_nothing_behind_for_the_next() -> None:
    executor = _executor(_model(), 0.1, momentum=0.9)
    theta = executor.vectors.parameters.clone()
    first, other, again = (torch.empty_like(theta) for _ in range(3))
    executor.train(_work(23, 5, 1), theta, 0.1, first)
    executor.train(_work(9, 4, 3), theta, 0.1, other)
    executor.train(_work(23, 5, 1), theta, 0.1, again)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_client_without_steps_returns_zero() -> None:
    executor = _executor(_model(), 0.1)
    theta = executor.vectors.parameters.clone()
    update = torch.ones_like(theta)
    assert executor.train(_work(0, 5, 2), theta, 0.1, update).tolist() == [0.0, 0.0, 0.0]
    assert not update.any()


def test_a_diverged_client_is_seen() -> None:
    executor = _executor(_model(), 0.0)
    theta = executor.vectors.parameters.clone()
    theta[3] = float("nan")
    largest = executor.train(_work(5, 5, 1), theta, 0.1, torch.empty_like(theta))[2]
    assert not largest.isfinite()


def test_with_the_filter_alone_updates_stay_in_its_range() -> None:
    # Plain SGD from theta: the update is a sum of filtered gradients, so filtering it again changes nothing.
    module = _model()
    layout = ParameterLayout(module)
    filtered = FILTERS["rfft"].build(layout.segments, 0.2)
    local = LocalMethods(filtered, FedAvg(), LocalSgd())
    executor = OneClient(module, layout, local, IMAGES, LABELS)
    theta = executor.vectors.parameters.clone()
    update = torch.empty_like(theta)
    executor.train(_work(23, 5, 3), theta, 0.1, update)
    projected = update.clone()
    filtered(projected)
    assert update.norm() > 1e-2
    torch.testing.assert_close(projected, update, rtol=0, atol=1e-6)


class Everything(LocalAlgorithm):
    """Uses every hook, and writes down what it saw."""

    own = ("one", "two")
    server = broadcast = ("sent",)
    uploads = ("answer",)
    frozen_at = ("anchor", "two")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.clients: list[Client] = []
        self.segments: Sequence[Segment] = ()
        self.own_before: list[Tensor] = []
        self.outputs: list[tuple[Tensor, Tensor, Tensor]] = []

    def bind(self, segments: Sequence[Segment]) -> None:
        self.segments = segments

    def begin(self, vectors: LocalVectors, client: Client) -> None:
        self.calls.append("begin")
        self.clients.append(client)
        assert torch.equal(vectors.parameters, vectors.anchor)
        self.own_before.append(torch.stack([vectors.own["one"], vectors.own["two"]]).clone())
        assert client.full_gradient is not None
        client.full_gradient(vectors.uploads["answer"])

    def gradient(self, vectors: LocalVectors, backward: Callable[[], None], client: Client) -> None:
        self.calls.append("gradient")
        assert client is self.clients[-1]
        kept = vectors.parameters.clone()
        backward()
        vectors.parameters.add_(0.01)
        backward()
        vectors.parameters.copy_(kept)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor, client: Client) -> Tensor:
        self.calls.append("loss")
        with torch.no_grad():
            self.outputs.append((model(inputs), client.frozen["anchor"](inputs), client.frozen["two"](inputs)))
        return super().loss(model, inputs, labels, client) * 2

    def correct(self, vectors: LocalVectors) -> None:
        self.calls.append("correct")

    def end(self, vectors: LocalVectors, update: Tensor, client: Client) -> None:
        self.calls.append("end")
        vectors.own["one"].add_(1)
        vectors.own["two"].copy_(vectors.received["sent"])


def test_every_hook_is_called_in_its_place() -> None:
    algorithm = Everything()
    executor = _executor(_model(), 0.0, algorithm=algorithm)
    theta = executor.vectors.parameters.clone()
    update, answer = torch.empty_like(theta), torch.empty_like(theta)
    executor.sent = {"sent": theta + 1}
    work = _work(11, 10, 1)
    loss = executor.train(work, theta, 0.1, update, uploads={"answer": answer})[0]
    step = ["gradient", "loss", "loss", "correct"]
    assert algorithm.calls == ["begin", *step, *step, "end"]
    (client,) = algorithm.clients
    assert (client.lr, client.num_steps, client.effective_steps, client.is_new) == (0.1, 2, 2.0, True)
    assert client.class_counts.tolist() == [4, 4, 3]
    assert [segment.name for segment in algorithm.segments][:1] == ["conv1.weight"]
    assert not algorithm.own_before[0].any()
    # The loss that is reported is the first of a step's two, at the client's own parameters.
    first = F.cross_entropy(algorithm.outputs[0][0], LABELS[work.order[:10]]) * 2
    second = F.cross_entropy(algorithm.outputs[2][0], LABELS[work.order[10:]]) * 2
    assert float(loss) == pytest.approx(float(10 * first + second) / 11, rel=1e-5)
    assert torch.equal(executor.kept, torch.stack([torch.ones_like(theta), theta + 1]))


def test_what_a_client_keeps_is_given_to_it_and_to_nobody_else() -> None:
    algorithm = Everything()
    executor = _executor(_model(), 0.0, algorithm=algorithm)
    theta = executor.vectors.parameters.clone()
    spare, answer = torch.empty_like(theta), torch.empty_like(theta)
    executor.train(_work(11, 10, 1), theta, 0.1, spare, uploads={"answer": answer})
    kept = torch.stack([theta + 5, theta - 5])
    executor.train(_work(11, 10, 1), theta, 0.1, spare, own=kept, uploads={"answer": answer})
    executor.train(_work(11, 10, 1), theta, 0.1, spare, uploads={"answer": answer})
    assert [client.is_new for client in algorithm.clients] == [True, False, True]
    assert torch.equal(algorithm.own_before[1], kept)
    assert not algorithm.own_before[2].any()


def test_the_frozen_models_are_the_model_at_their_vectors() -> None:
    algorithm = Everything()
    module = _model()
    other = copy.deepcopy(module)
    executor = _executor(module, 0.0, algorithm=algorithm)
    theta = executor.vectors.parameters.clone()
    ParameterLayout(other).bind(other, theta - 0.1)
    spare, answer = torch.empty_like(theta), torch.empty_like(theta)
    own = torch.stack([theta, theta - 0.1])
    work = _work(11, 10, 2)
    executor.train(work, theta, 0.1, spare, own=own, uploads={"answer": answer})
    inputs = IMAGES[work.order[:10]]
    mine, anchored, kept = algorithm.outputs[0]
    torch.testing.assert_close(anchored, mine)  # the first step starts from the global model
    torch.testing.assert_close(kept, other(inputs))
    assert not torch.allclose(algorithm.outputs[-1][0], algorithm.outputs[-1][1])
    assert not any(p.requires_grad for frozen in algorithm.clients[0].frozen.values() for p in frozen.parameters())


@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_the_full_gradient_is_of_all_samples_once_and_filtered(ratio: float) -> None:
    module = _model()
    plain = copy.deepcopy(module)
    algorithm = Everything()
    executor = _executor(module, ratio, algorithm=algorithm)
    theta = executor.vectors.parameters.clone()
    spare, answer = torch.empty_like(theta), torch.empty_like(theta)
    executor.train(_work(11, 4, 3), theta, 0.1, spare, uploads={"answer": answer})
    F.cross_entropy(plain(IMAGES[:11]), LABELS[:11]).backward()
    gradients = [p.grad.numpy() for p in plain.parameters() if p.grad is not None]
    if ratio:
        gradients = [_numpy_high_pass(gradient, ratio) for gradient in gradients]
    expected = torch.cat([torch.from_numpy(gradient).reshape(-1) for gradient in gradients])
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-6)


def test_the_filter_is_told_round_and_seed() -> None:
    class Told(Identity):
        def prepare(self, round_number: int, seed: int) -> None:
            told.append((round_number, seed))

    told: list[tuple[int, int]] = []
    module = _model()
    layout = ParameterLayout(module)
    local = LocalMethods(Told(layout.segments), FedAvg(), LocalSgd())
    executor = OneClient(module, layout, local, IMAGES, LABELS)
    theta = executor.vectors.parameters.clone()
    executor.train(_work(5, 5, 1), theta, 0.1, torch.empty_like(theta))
    assert told == [(ROUND_INDEX + 1, FILTER_SEED)]


def test_frozen_parameters_stay_and_frozen_models_have_them() -> None:
    algorithm = Everything()
    module = _model()
    layout = ParameterLayout(module, ["fc.*"])
    local = LocalMethods(Identity(layout.segments), algorithm, LocalSgd())
    executor = OneClient(module, layout, local, IMAGES, LABELS)
    theta = executor.vectors.parameters.clone()
    before = module.conv1.weight.clone()  # type: ignore[union-attr]
    executor.train(_work(5, 5, 1), theta, 0.1, torch.empty_like(theta), uploads={"answer": torch.empty_like(theta)})
    assert torch.equal(module.conv1.weight, before)  # type: ignore[arg-type]
    frozen = algorithm.clients[0].frozen["anchor"]
    assert torch.equal(frozen.conv1.weight, before)  # type: ignore[arg-type]
    assert torch.equal(frozen.fc.weight.reshape(-1), theta[: frozen.fc.weight.numel()])  # type: ignore[union-attr]
