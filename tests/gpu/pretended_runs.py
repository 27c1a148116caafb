"""Whole runs and single clients on the pretended GPU, with what they are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.one_client import OneClient
from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.executors.base import ClientWork, Sent
from fedspec_dist.clients.executors.sequential import SequentialExecutor
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.statistics.derivatives import FisherDiagonal, Sketches
from fedspec_dist.clients.step import LocalMethods
from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.distributed.collectives import ProcessGroup
from tests.gpu.pretend import GPU, PretendedGpu, machine
from tests.rounds.jobs import Finished, run_job, tiny


def run_on_gpu(overrides: Sequence[str], folder: Path) -> tuple[Finished, PretendedGpu]:
    """A run on one rank, whose collectives go through the process group as over NCCL.

    No client must wait but the first, for which tables go to the GPU once and for all.
    """
    with machine(over_nccl=True) as gpu, _no_wait_in_clients(gpu):
        finished = run_job(tiny([*overrides, "runtime.device=cuda"]), folder, ProcessGroup(GPU))
    return finished, gpu


@contextmanager
def _no_wait_in_clients(gpu: PretendedGpu) -> Iterator[None]:
    train, trained = SequentialExecutor.train, set()

    def watched(executor: SequentialExecutor, sent: Sent, work: Iterable[ClientWork], *args: Any) -> Any:
        def clients() -> Iterator[ClientWork]:
            for client in work:
                gpu.forbid_waits = executor in trained
                trained.add(executor)
                yield client
                gpu.forbid_waits = False  # what is sent to the next client is counted, not forbidden

        try:
            return train(executor, sent, clients(), *args)
        finally:
            gpu.forbid_waits = False

    def waiting(found: Callable[..., Any]) -> Callable[..., Any]:
        """A sketch may wait: how many eigenvalues there are decides what follows."""

        def allowed(*args: Any) -> Any:
            forbidden, gpu.forbid_waits = gpu.forbid_waits, False
            try:
                return found(*args)
            finally:
                gpu.forbid_waits = forbidden

        return allowed

    sketch, diagonal = waiting(Sketches.compute), waiting(FisherDiagonal.compute)
    with (
        patch.object(SequentialExecutor, "train", watched),
        patch.object(Sketches, "compute", sketch),
        patch.object(FisherDiagonal, "compute", diagonal),
    ):
        yield


def steps_on_gpu(
    module: nn.Module, shape: tuple[int, int, int], algorithm: LocalAlgorithm, kept: str
) -> tuple[PretendedGpu, int]:
    """A client that has been there before, of one step and of two; it must not wait. What a step launches."""
    with machine() as gpu:
        module, layout = module.to(GPU), ParameterLayout(module)
        images, labels = torch.ones(4, *shape).to(GPU), (torch.arange(4) % 3).to(GPU)
        methods = LocalMethods(FILTERS[kept].build(layout.segments), algorithm, LocalSgd(0.9, 1e-3, 10.0))
        gather = Augmentation(padding=1, flip=True).gather
        executor = OneClient(module, layout, methods, images, labels, gather)
        theta = executor.vectors.parameters.clone()
        samples, draws = torch.arange(4).to(GPU), torch.zeros(4, 3, dtype=torch.int64).to(GPU)
        counts = torch.full((10,), 4).to(GPU)
        own = torch.stack([theta for _ in algorithm.own]) if algorithm.own else None
        uploads = {name: torch.empty_like(theta) for name in algorithm.uploads}
        update, launches = torch.empty_like(theta), []
        for bounds in ([(0, 2)], [(0, 2)], [(0, 2), (2, 4)]):  # the first fills caches
            gpu.launches.clear()
            work = ClientWork(0, samples, samples, bounds, draws, counts, filter_seed=0)
            result = executor.train(work, theta, 0.1, update, own=own, uploads=uploads)
            launches.append(sum(gpu.launches.values()))
            gpu.forbid_waits = True
        gpu.forbid_waits = False
        assert result.isfinite().all()
    return gpu, launches[2] - launches[1]
