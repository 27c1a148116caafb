"""The executor against an ordinary PyTorch loop."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspec_dist.clients.fedavg import FedAvg
from fedspec_dist.clients.sequential import ClientWork, LocalMethods, SequentialExecutor
from fedspec_dist.clients.sgd import LocalSgd
from fedspec_dist.data.augment import Augmentation
from fedspec_dist.data.batches import batch_bounds
from fedspec_dist.filters.identity import Identity
from fedspec_dist.filters.spectral import HighPass
from fedspec_dist.models.cnn import Cnn
from fedspec_dist.parameters import ParameterLayout

IMAGES = torch.randn(23, 8, 8, 1, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)
LABELS = torch.arange(23) % 3


def _model() -> nn.Module:
    torch.manual_seed(1)
    return Cnn((1, 8, 8), 3, width=4)


def _executor(module: nn.Module, ratio: float, momentum: float = 0.0) -> SequentialExecutor:
    layout = ParameterLayout(module)
    kept = HighPass(layout.segments, ratio) if ratio else Identity(layout.segments)
    local = LocalMethods(kept, FedAvg(), LocalSgd(momentum, weight_decay=0.01, clip_norm=1.0))
    return SequentialExecutor(module, layout, F.cross_entropy, local, IMAGES, LABELS, Augmentation().gather)


def _work(num_samples: int, batch_size: int, epochs: int) -> ClientWork:
    orders = [torch.randperm(num_samples, generator=torch.Generator().manual_seed(e)) for e in range(epochs)]
    return ClientWork(torch.cat(orders), batch_bounds(num_samples, batch_size, epochs), None)


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
    filtered = HighPass(layout.segments, 0.2)
    local = LocalMethods(filtered, FedAvg(), LocalSgd())
    executor = SequentialExecutor(module, layout, F.cross_entropy, local, IMAGES, LABELS, Augmentation().gather)
    theta = executor.vectors.parameters.clone()
    update = torch.empty_like(theta)
    executor.train(_work(23, 5, 3), theta, 0.1, update)
    projected = update.clone()
    filtered(projected)
    assert update.norm() > 1e-2
    torch.testing.assert_close(projected, update, rtol=0, atol=1e-6)
