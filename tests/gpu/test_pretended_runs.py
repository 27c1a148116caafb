"""The package on a pretended GPU: nothing is refused, nothing waits inside a client, few launches, the CPU's model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedspec_dist.clients.statistics import derivatives
from fedspec_dist.config.methods import FILTERS, LOCAL_ALGORITHMS, MODELS
from fedspec_dist.distributed.collectives import Collectives, ProcessGroup
from fedspec_dist.fisher import products
from fedspec_dist.fisher.sketch import random_basis
from fedspec_dist.models.small import Cnn
from fedspec_dist.processes.gpus import set_deterministic
from tests.distributed.harness import run_ranks
from tests.gpu import pretend
from tests.gpu.pretend import FREE_BYTES, GPU, machine
from tests.gpu.pretended_runs import run_on_gpu, steps_on_gpu
from tests.rounds.jobs import run_job, tiny
from tests.rounds.test_every_method import SETTINGS

RUNS = {
    **SETTINGS,
    "median": ["server.aggregator=median"],
    "trimmed_mean": ["server.aggregator={type: trimmed_mean, trim: 0.3}"],
    "fedgh": ["server.aggregator=fedgh", "server.filter={type: rfft, ratio: 0.1}"],
    "fedlws": ["server.aggregator=fedlws", "local.momentum=0.5"],
    "fipa": ["server.aggregator={type: fipa, rank: 2, oversampling: 2}"],
    "fipa tsqr": ["server.aggregator={type: fipa, rank: 2, oversampling: 2, merge: tsqr}"],
    "feddisco": ["server.weights=feddisco", "server.optimizer=adam"],
    "fedawa": ["server.weights=fedawa", "server.optimizer=momentum"],
    "gather": ["runtime.aggregation=gather", "local.clip_norm=1.0"],
    "crop and flip in colour": [
        "data.shape=[3, 8, 8]",
        "data.augment=[flip, {type: crop, padding: 2, mode: zero}]",
        "filter=gaussian",
    ],
    "crop of edges in colour": ["data.shape=[3, 8, 8]", "data.augment=[crop]", "filter=lapd"],
    "full gradient and augmentation": [
        "local.algorithm={type: scaffold, option: 1}",
        "data.augment=[flip]",
        "filter=l2_rescale",
    ],
    "skip": ["runtime.on_nonfinite=skip", "filter=rfft_high"],
    "centralization": ["filter=gradient_centralization", "local.steps=2", "sampling=bernoulli"],
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """As a run has it, but with memory that is not written yet full of NaN."""
    set_deterministic(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_is_a_run_on_a_cpu(name: str, tmp_path: Path) -> None:
    settings = [*RUNS[name], "model=mlp", "model.hidden=[6]", "checkpoint.every=1"]
    found, gpu = run_on_gpu(settings, tmp_path / "gpu")
    expected = run_job(tiny(settings), tmp_path / "cpu")
    for key, tensor in expected.model.items():
        torch.testing.assert_close(found.model[key], tensor, rtol=1e-4, atol=1e-6)
    assert not gpu.draws, "what a GPU draws depends on its type"


# What a step of ResNet-20 launches: the backward pass, the filter, clipping, momentum, the step.
LAUNCHES = {
    "none": 349,
    "rfft": 431,
    "rfft_high": 429,
    "random": 429,
    "l2_rescale": 507,
    "lapd": 448,
    "gaussian": 448,
    "gradient_centralization": 385,
}


@pytest.mark.parametrize("kept", FILTERS)
def test_a_step_stays_within_its_budget_of_launches(kept: str) -> None:
    model = MODELS["resnet20"].build((3, 8, 8), 10)
    _, launches = steps_on_gpu(model, (3, 8, 8), LOCAL_ALGORITHMS["fedavg"].build(), kept)
    assert launches <= LAUNCHES[kept]


def _nothing_waits(algorithm: str, kept: str) -> None:
    model = MODELS["mlp"].build((1, 4, 4), 10, hidden=[3])
    gpu, launches = steps_on_gpu(model, (1, 4, 4), LOCAL_ALGORITHMS[algorithm].build(), kept)
    assert not gpu.errors
    assert launches > 0


@pytest.mark.parametrize(("algorithm", "kept"), [*zip(LOCAL_ALGORITHMS, cycle(FILTERS), strict=False)])
def test_nothing_waits_inside_a_client(algorithm: str, kept: str) -> None:
    """Also of a client that kept something; each filter at least once."""
    _nothing_waits(algorithm, kept)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "kept"), [*product(LOCAL_ALGORITHMS, FILTERS)])
def test_nothing_waits_inside_a_client_whatever_the_filter(algorithm: str, kept: str) -> None:
    _nothing_waits(algorithm, kept)


def _waits(overrides: list[str], folder: Path) -> Counter[str]:
    """By file."""
    _, gpu = run_on_gpu(["model=mlp", "model.hidden=[6]", *overrides], folder)
    waits: Counter[str] = Counter()
    for (reason, line), count in gpu.waits.items():
        waits[f"{line.partition(':')[0]}, {reason}"] += count
    return waits


# Per client, in two rounds; of the second, whose client was there in the first or not.
WAITS_PER_CLIENT: dict[str, dict[str, int]] = {
    "fedavg": {},
    "scaffold": {"rounds/client_states.py, a copy to the host": 2},
    "fisher_diagonal": {},
}


@pytest.mark.parametrize("name", WAITS_PER_CLIENT)
def test_a_round_waits_no_more_often_with_more_clients(name: str, tmp_path: Path) -> None:
    settings = [*SETTINGS[name], "filter=random", "rounds=2"]
    few, many = (_waits([*settings, f"clients_per_round={count}"], tmp_path / str(count)) for count in (2, 6))
    more = {place: (many[place] - few[place]) / 4 for place in many if many[place] != few[place]}
    assert more == WAITS_PER_CLIENT[name]


@pytest.mark.parametrize("name", ["fedavg", "fedgh", "median", "fipa", "fipa tsqr"])
def test_a_round_waits_no_more_often_with_more_blocks(name: str, tmp_path: Path) -> None:
    settings = [*RUNS[name], "rounds=1", "server.filter=none"]
    one, several = (_waits([*settings, f"model.hidden=[{width}]"], tmp_path / str(width)) for width in (6, 60))
    assert several == one


def test_jacobians_that_fit_into_one_launch_are_made_in_one() -> None:
    def launches(num_samples: int) -> int:
        with machine() as gpu:
            theta, images = torch.ones(12).to(GPU), torch.ones(num_samples, 4).to(GPU)
            products.from_jacobians(
                lambda theta, inputs: inputs @ theta.view(4, 3), theta, images, lambda outputs, jacobian: jacobian
            )
        return sum(gpu.launches.values())

    assert launches(2) == launches(1000)


@pytest.mark.parametrize(
    ("settings", "contiguous"),
    [(["runtime.device=cuda"], True), (["runtime.device=cuda", "runtime.precision=tf32"], False), ([], False)],
)
def test_models_get_images_in_the_memory_format_of_their_device(
    settings: list[str], contiguous: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In training with and without augmentation, and in evaluation."""
    forward, seen = Cnn.forward, []

    def watched(model: Cnn, images: torch.Tensor) -> torch.Tensor:
        if images.is_cuda or not settings:  # not the trial on the host before the first round
            seen.append((images.is_contiguous(), images.is_contiguous(memory_format=torch.channels_last)))
        return forward(model, images)

    monkeypatch.setattr(Cnn, "forward", watched)
    for augment in ("[]", "[flip]"):
        overrides = ["data.shape=[3, 8, 8]", "rounds=1", f"data.augment={augment}", *settings]
        with machine() if settings else contextlib.nullcontext():
            run_job(tiny(overrides), tmp_path / augment)
    assert set(seen) == {(contiguous, not contiguous)}


def test_jacobians_that_fit_into_free_memory_are_made_once_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However little memory the config allows, since how much of a GPU is free must not decide the result."""
    monkeypatch.setattr(products, "_LARGE_BYTES", 20_000)  # a few samples a block
    sketches = ["server.aggregator={type: fipa, rank: 2, oversampling: 2}", "model=mlp", "model.hidden=[6]"]
    sketches += ["runtime.sketch_memory_mb=0", "rounds=1"]
    models, launches = [], []
    for free in (FREE_BYTES, 0, 150_000):
        monkeypatch.setattr(pretend, "FREE_BYTES", free)
        finished, gpu = run_on_gpu(sketches, tmp_path / str(free))
        models.append(finished.model)
        launches.append(sum(gpu.launches.values()))
    for model in models[1:]:
        assert all(torch.equal(model[key], tensor) for key, tensor in models[0].items())
    plenty, none, some = launches
    assert plenty < some < none


def test_a_sketch_starts_from_the_same_basis_on_any_device_drawn_once_a_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn = []

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(random_basis(*args, **kwargs).cpu())
        return drawn[-1].to(args[3])

    monkeypatch.setattr(derivatives, "random_basis", watched)
    sketches = ["server.aggregator={type: fipa, rank: 2, oversampling: 2}", "model=mlp", "model.hidden=[6]"]
    run_on_gpu(sketches, tmp_path / "gpu")
    run_job(tiny(sketches), tmp_path / "cpu")
    first, second, *on_cpu = drawn  # two rounds on each, of three clients
    assert torch.equal(torch.stack([first, second]), torch.stack(on_cpu))
    assert not torch.equal(first, second)


def _runs_over_nccl(collectives: Collectives, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    models = {}
    for name in RUNS:
        with machine(over_nccl=True) as gpu:
            over_nccl = ProcessGroup(GPU) if collectives.num_ranks > 1 else None
            config = tiny([*RUNS[name], "runtime.device=cuda"])
            models[name] = run_job(config, Path(folder) / str(collectives.num_ranks) / name, over_nccl).model
            assert not gpu.errors
    return models


@pytest.mark.slow
def test_ranks_over_nccl_have_the_bits_of_one(tmp_path: Path) -> None:
    (expected,) = run_ranks(_runs_over_nccl, 1, tmp_path, str(tmp_path), timeout_s=300)
    for found in run_ranks(_runs_over_nccl, 3, tmp_path, str(tmp_path), timeout_s=300):
        for name, model in expected.items():
            assert all(torch.equal(found[name][key], tensor) for key, tensor in model.items()), name
