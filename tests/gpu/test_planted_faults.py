"""Faults planted in the package: each has to be caught on the pretended GPU, with the line where it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedspec_dist.clients.algorithms.base import FedAvg
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.statistics import derivatives
from fedspec_dist.config.methods import LOCAL_ALGORITHMS, MODELS
from fedspec_dist.distributed.collectives import ProcessGroup
from fedspec_dist.distributed.update_matrix import UpdateMatrix
from fedspec_dist.filters import ablations, detrend
from fedspec_dist.filters.identity import Identity
from fedspec_dist.processes.gpus import set_deterministic
from fedspec_dist.rounds import sampling
from tests.gpu.pretend import GPU, machine
from tests.gpu.pretended_runs import run_on_gpu, steps_on_gpu

QUICK = ["model=mlp", "model.hidden=[4]", "rounds=1"]
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _after(owner: Any, name: str, what: Callable[..., Any]) -> Plant:
    """`what` is called with the arguments after what was there, and gives the result if it has one."""
    before = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        result = before(*args, **kwargs)
        changed = what(result, *args)
        return result if changed is None else changed

    return lambda monkeypatch: monkeypatch.setattr(owner, name, planted)


def _in_step(what: Callable[[Tensor], Any]) -> Plant:
    """On the gradient, in every local step."""
    return _after(LocalSgd, "step", lambda result, sgd, parameters, gradient, *more: (what(gradient), None)[1])


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: Tensor) -> Tensor:  # type: ignore[override]
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float(gradient)


def _ask_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    before = FedAvg.loss
    monkeypatch.setattr(FedAvg, "loss", lambda *args: _AsksInBackward.apply(before(*args)))


WAITS = {
    "item": (_in_step(lambda gradient: gradient.sum().item()), "_local_scalar_dense"),
    "an if": (_in_step(lambda gradient: bool(gradient.isfinite().all())), "_local_scalar_dense"),
    "a list": (_in_step(lambda gradient: gradient[:3].tolist()), "a copy to the host"),
    "a copy home": (_in_step(lambda gradient: gradient.cpu()), "a copy to the host"),
    "a table from the host": (_in_step(lambda gradient: torch.ones(3).to(gradient.device)), "pageable memory"),
    "a number from the host": (_in_step(lambda g: torch.tensor(2.0, device=g.device)), "pageable memory"),
    "not pinned": (_in_step(lambda g: torch.ones(3).to(g.device, non_blocking=True)), "pageable memory"),
    "a mask": (_in_step(lambda gradient: gradient[gradient > 0]), "an index by a mask"),
    "an index from the host": (_in_step(lambda gradient: gradient[torch.arange(3)]), "an index from the host"),
    "nonzero": (_in_step(lambda gradient: gradient.nonzero()), "nonzero"),
    "unique": (_in_step(lambda gradient: gradient.unique()), "unique"),
    "equal": (_in_step(lambda gradient: torch.equal(gradient, gradient)), "equal"),
    "synchronize": (_in_step(lambda gradient: torch.cuda.synchronize()), "synchronize"),
    "in the backward pass": (_ask_in_backward, "_local_scalar_dense"),
    "a mask of a filter": (
        lambda monkeypatch: monkeypatch.setattr(ablations, "_sent", lambda mask, device: mask.to(device)),
        "pageable memory",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_inside_a_client(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant, reason = WAITS[name]
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match=rf"waits for the GPU: .*{reason}.*, at (clients|filters)/[\w/]+\.py:\d+$"):
        run_on_gpu([*QUICK, "filter={type: random, ratio: 0.2}"], tmp_path)


REFUSED = {
    "a host tensor beside one on the GPU": (
        _in_step(lambda gradient: gradient + torch.ones(gradient.shape)),
        r"tensors on the GPU and on the host, at clients/[\w/]+\.py:\d+$",
    ),
    "an index_select from the host": (
        _in_step(lambda gradient: gradient.index_select(0, torch.arange(3))),
        r"tensors on the GPU and on the host",
    ),
    "a kernel that adds in any order": (_in_step(lambda gradient: gradient.kthvalue(2)), r"no deterministic kernel"),
    "another, of the backward pass": (
        _in_step(lambda g: torch.nn.functional.pad(g[None].requires_grad_(), (1, 1), "reflect").sum().backward()),
        r"no deterministic kernel",
    ),
    "a host tensor in a collective": (
        _after(ProcessGroup, "_stage", lambda staged, *args: staged.cpu()),
        r"NCCL got a tensor on the host: c10d",
    ),
    "a tensor with gaps in a collective": (
        _after(ProcessGroup, "_stage", lambda staged, *args: torch.stack([staged, staged], -1)[..., 0]),
        r"NCCL got a tensor that is not contiguous",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_or_nccl_refuses(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant, reason = REFUSED[name]
    plant(monkeypatch)
    set_deterministic(True)
    try:
        with pytest.raises(RuntimeError, match=reason):
            run_on_gpu(QUICK, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_numpy_of_a_tensor_on_the_gpu() -> None:
    with machine() as gpu:
        tensor = torch.ones(3).to(GPU)
        with pytest.raises(TypeError, match="to numpy"):
            tensor.numpy()
        with pytest.raises(TypeError, match="to numpy"):
            np.asarray(tensor)
    with pytest.raises(RuntimeError, match="outside of `machine`"):
        tensor + 1
    assert not gpu.errors


def _num_waits(folder: Path, *overrides: str) -> int:
    return sum(run_on_gpu([*QUICK, *overrides], folder)[1].waits.values())


def test_a_pageable_copy_for_each_client_shows_in_the_number_of_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    more = ["local.algorithm=scaffold", "data.augment=[flip]"]
    sound = _num_waits(tmp_path / "sound", *more)
    monkeypatch.setattr(sampling, "send", lambda tensor, device: tensor.to(device))
    # Samples, order, draws and counts of three clients.
    assert _num_waits(tmp_path / "planted", *more) == sound + 4 * 3


def test_a_copy_for_each_block_shows_in_the_number_of_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def combine(matrix: UpdateMatrix, coefficients: Tensor) -> Tensor:
        parts = [torch.mv(block.double().T, coefficients.to(block.device)) for block in matrix._blocks]
        return torch.cat(parts)

    wide = ["model.hidden=[300]"]  # 20,000 parameters, 20 blocks
    sound = _num_waits(tmp_path / "sound", *wide)
    monkeypatch.setattr(UpdateMatrix, "combine", combine)
    assert _num_waits(tmp_path / "planted", *wide) == sound + 19


def test_a_loop_over_the_kernel_shows_in_the_number_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def launches() -> int:
        model = MODELS["mlp"].build((1, 8, 8), 10, hidden=[8])
        return steps_on_gpu(model, (1, 8, 8), LOCAL_ALGORITHMS["fedavg"].build(), "lapd")[1]

    sound = launches()
    monkeypatch.setattr(detrend, "_sums_at_once", detrend._sums)
    assert launches() > sound + 30


def test_numbers_drawn_on_the_gpu_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sketches = [*QUICK, "server.aggregator={type: fipa, rank: 2, oversampling: 1}"]
    assert not run_on_gpu(sketches, tmp_path / "sound")[1].draws
    monkeypatch.setattr(derivatives, "random_basis", lambda p, columns, *more: torch.randn(p, columns, device=GPU))
    _, gpu = run_on_gpu(sketches, tmp_path / "planted")
    assert [line.partition(":")[0] for line in gpu.draws] == ["clients/statistics/derivatives.py"]


def test_memory_that_is_read_before_it_is_written_is_not_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Identity, "__call__", lambda self, gradient: gradient.add_(torch.empty_like(gradient)))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="returned a non-finite update"):
            run_on_gpu([*QUICK, "filter=none"], tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
