"""What a GPU is told and asked, without one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fedspec_dist.config import ConfigError, load
from fedspec_dist.processes import gpus
from fedspec_dist.processes.environment import Environment, LaunchError
from fedspec_dist.processes.gpus import (
    gpu_names,
    gpu_problem,
    has_kernels_for,
    image_format,
    set_deterministic,
    set_precision,
    spare_memory,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.fp32_precision = "none"
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = cudnn


@pytest.mark.parametrize(("before", "after"), [("float32", "tf32"), ("tf32", "float32")])
def test_convolutions_and_matrix_products_round_alike(before: str, after: str) -> None:
    set_precision(before, GPU)
    torch.backends.fp32_precision = "tf32" if before == "tf32" else "ieee"  # a plugin's, say
    set_precision(after, GPU)
    rounds = after == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is rounds
    found = {torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision}
    assert found == {"tf32" if rounds else "ieee"}


def test_a_cpu_has_no_tf32() -> None:
    with pytest.raises(LaunchError, match=r"runtime\.precision: got 'tf32', but this rank computes on a CPU"):
        set_precision("tf32", CPU)
    for more in (["runtime.deterministic=true"], ["runtime.device=cpu"]):
        with pytest.raises(ConfigError, match=r"^runtime\.precision: got 'tf32'"):
            load(None, ["runtime.precision=tf32", *more])


def test_precision_decides_the_result_and_at_its_default_keeps_the_names_of_runs() -> None:
    assert load().fingerprint() == load(None, ["runtime.precision=float32"]).fingerprint() == "561ec6fb"
    assert load(None, ["runtime.precision=tf32"]).fingerprint() != load().fingerprint()


def _fills() -> int:
    """Fills in a step of a convolution, by torch's own profiler."""
    images, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.nn.functional.conv2d(images, kernel).square().sum().backward()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::fill_")


def test_deterministic_steps_fill_no_memory_that_others_do_not() -> None:
    expected = _fills()
    torch.use_deterministic_algorithms(True)
    assert _fills() > expected, "torch fills by itself"
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert _fills() == expected


def test_images_lie_as_the_convolutions_of_the_device_want_them() -> None:
    assert image_format(CPU, "float32") == image_format(GPU, "tf32") == torch.channels_last
    assert image_format(GPU, "float32") == torch.contiguous_format


def test_ranks_that_share_a_gpu_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 2**30, 141 * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert spare_memory(CPU, Environment()) == 0
    assert spare_memory(GPU, Environment()) == spare_memory(GPU, Environment(local_num_ranks=2)) == 20 * 2**30
    assert spare_memory(GPU, Environment(local_num_ranks=5)) == spare_memory(GPU, Environment()) // 3


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),  # the same major, a later minor
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled when it is needed
        ((7, 0), ["sm_75", "compute_75"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),  # made for one capability only
        ((10, 3), ["sm_100"], True),
        ((9, 0), [], False),
        ((9, 0), ["gfx90a"], False),
    ],
)
def test_which_gpus_a_build_has_kernels_for(capability: tuple[int, int], built_for: list[str], expected: bool) -> None:
    assert has_kernels_for(capability, built_for) is expected


def test_a_gpu_that_the_build_knows_nothing_of_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (3, 5))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA K40")
    assert gpu_problem(CPU) == ""
    assert gpu_problem(GPU).startswith("NVIDIA K40 has capability 3.5, and torch ")
    assert gpu_problem(GPU).endswith("has kernels for sm_75, sm_80")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_35"])
    monkeypatch.setattr(gpus, "_step", lambda device: (_ for _ in ()).throw(RuntimeError("CUDA error: busy\nmore")))
    assert gpu_problem(GPU) == "a step on NVIDIA K40 fails: CUDA error: busy"


def test_a_gpu_has_a_name_and_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(uuid="GPU-1", pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert gpu_names(GPU) == ("GPU-1", "00:1b:00")
    assert gpu_names(CPU) == ("", "")
    del facts.pci_bus_id  # an older torch
    assert gpu_names(GPU) == ("GPU-1", "")
