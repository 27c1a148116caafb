"""What only a GPU can show. Skipped where there is none; logic that a CPU can test is tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.one_client import OneClient
from fedspec_dist.clients.executors.base import ClientWork
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.step import LocalMethods
from fedspec_dist.config.methods import FILTERS, LOCAL_ALGORITHMS, MODELS
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.distributed.collectives import ProcessGroup
from fedspec_dist.filters.spectral import high_pass
from fedspec_dist.processes.gpus import gpu_problem, set_deterministic, set_precision
from fedspec_dist.rounds.sampling import batch_bounds
from tests.end_to_end.cli import results_of, run
from tests.gpu.test_pretended_runs import RUNS
from tests.rounds.jobs import run_job, tiny
from tests.rounds.test_every_method import SETTINGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")

PHASES = "phases=[{rounds: 2, server: {aggregator: fedgh}}, {rounds: 2, server: {aggregator: {type: fipa, rank: 4}}}]"
DATA = ["data.dataset=synthetic", "data.shape=[3, 16, 16]", "data.num_train=400", "data.num_test=100"]
DATA += ["data.partition={type: iid, clients: 8}", "data.augment=[flip, crop]", "clients_per_round=4", "local.epochs=1"]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_deterministic_runs_repeat_and_gathering_changes_nothing(model: str, tmp_path: Path) -> None:
    settings = [*DATA, f"model={model}", PHASES, "runtime.deterministic=true", "runtime.device=cuda"]
    for output, more in (("first", []), ("again", []), ("gathered", ["runtime.aggregation=gather"])):
        run(tmp_path, *settings, f"output={output}", *more, timeout_s=300).expect(0)
    assert results_of(tmp_path, "first") == results_of(tmp_path, "again") == results_of(tmp_path, "gathered")


def test_two_ranks_share_a_gpu_over_gloo_with_the_same_bits(tmp_path: Path) -> None:
    settings = [*DATA, "model=cnn", PHASES, "runtime.deterministic=true", "runtime.device=cuda", "runtime.backend=gloo"]
    run(tmp_path, *settings, "output=one", timeout_s=300).expect(0)
    run(tmp_path, *settings, "output=two", ranks=2, timeout_s=300).expect(0)
    assert results_of(tmp_path, "one") == results_of(tmp_path, "two")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs are visible")
def test_two_ranks_over_nccl_have_the_bits_of_one(tmp_path: Path) -> None:
    settings = [*DATA, "model=cnn", PHASES, "runtime.deterministic=true"]
    run(tmp_path, *settings, "output=one", timeout_s=300).expect(0)
    run(tmp_path, *settings, "output=two", ranks=2, timeout_s=300).expect(0)
    assert results_of(tmp_path, "one") == results_of(tmp_path, "two")
    (environment,) = (tmp_path / "two").glob("*/environment.json")
    assert json.loads(environment.read_text())["backend"] == "nccl"


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """As a run has it, but with memory that is not written yet full of NaN."""
    set_precision("float32", torch.device("cuda", 0))
    set_deterministic(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nccl() -> Iterator[ProcessGroup]:
    """A group of one rank; a run of one has none."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    assert dist.get_backend() == "nccl"
    yield ProcessGroup(device)
    dist.destroy_process_group()


def test_every_visible_gpu_computes() -> None:
    assert [gpu_problem(torch.device("cuda", gpu)) for gpu in range(torch.cuda.device_count())] == [
        "" for _ in range(torch.cuda.device_count())
    ]


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_collectives_are_nccls_has_the_bits_of_one_without(
    name: str, nccl: ProcessGroup, tmp_path: Path
) -> None:
    config = tiny([*RUNS[name], "runtime.device=cuda"])
    found, expected = run_job(config, tmp_path / "nccl", nccl), run_job(config, tmp_path / "alone")
    assert nccl.bytes_sent == 0
    assert all(torch.equal(found.model[key], tensor) for key, tensor in expected.model.items())


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", SETTINGS)
def test_every_method_runs_on_a_gpu_and_repeats(name: str, tmp_path: Path) -> None:
    config = tiny([*SETTINGS[name], "rounds=3", "runtime.device=cuda", "runtime.deterministic=true"])
    first, again = (run_job(config, tmp_path / folder) for folder in ("first", "again"))
    assert first.results() == again.results()
    assert all(torch.equal(again.model[key], tensor) for key, tensor in first.model.items())
    assert all(tensor.isfinite().all() for tensor in first.model.values())


@pytest.mark.parametrize("name", LOCAL_ALGORITHMS)
@pytest.mark.parametrize("kept", FILTERS)
def test_inside_a_client_nothing_waits_for_the_device(name: str, kept: str) -> None:
    device = torch.device("cuda")
    model = MODELS["resnet20"].build((3, 16, 16), 10).to(device)
    layout = ParameterLayout(model)
    images = torch.randn(100, 16, 16, 3, device=device).permute(0, 3, 1, 2)
    labels = torch.arange(100, device=device) % 10
    augmentation = Augmentation(padding=2, flip=True)
    algorithm = LOCAL_ALGORITHMS[name].build()
    local = LocalMethods(FILTERS[kept].build(layout.segments), algorithm, LocalSgd(0.9, 1e-3, 10.0))
    executor = OneClient(model, layout, local, images, labels, augmentation.gather)
    theta = executor.vectors.parameters.clone()
    draws = torch.zeros(100, 3, dtype=torch.int64, device=device)
    samples, counts = torch.arange(100, device=device), torch.full((10,), 10, device=device)
    work = ClientWork(0, samples, samples, batch_bounds(100, 40, 1), draws, counts, filter_seed=0)
    update = torch.empty_like(theta)
    own = torch.stack([theta for _ in algorithm.own]) if algorithm.own else None
    uploads = {upload: torch.empty_like(theta) for upload in algorithm.uploads}
    executor.train(work, theta, 0.1, update, own=own, uploads=uploads)  # kernels are chosen and caches filled here
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = executor.train(work, theta, 0.1, update, own=own, uploads=uploads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.isfinite().all()


def test_the_filter_is_the_same_as_on_the_cpu() -> None:
    gradient = torch.randn(3, 27_648, generator=torch.Generator().manual_seed(0))
    on_gpu = high_pass(gradient.cuda(), 0.05).cpu()
    torch.testing.assert_close(on_gpu, high_pass(gradient, 0.05), rtol=0, atol=1e-5)
