"""What a GPU is told before a run, and asked of itself: arithmetic, memory, names, health."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import conv2d

from fedspec_dist.processes.environment import Environment, LaunchError

# Of a GPU's free memory, what a rank may take for what it could also make again.
_SPARE_SHARE = 0.25


def set_deterministic(deterministic: bool) -> None:
    """Kernels that give the same bits each time, or none."""
    torch.backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Else every tensor that is about to be written is filled first, with launches that outnumber a step's own.
        _settings_of(torch.utils.deterministic).fill_uninitialized_memory = False


def set_precision(precision: str, device: torch.device) -> None:
    """Whether convolutions and matrix products of float32 round their inputs to TF32: all of them, or none.

    torch by itself lets convolutions do so and matrix products not, on GPUs that can.

    Raises:
        LaunchError: TF32 on a CPU.
    """
    rounds = precision == "tf32"
    if rounds and device.type != "cuda":
        raise LaunchError("runtime.precision: got 'tf32', but this rank computes on a CPU; allowed here: float32")
    matmul, cudnn = _settings_of(torch.backends.cuda.matmul), _settings_of(torch.backends.cudnn)
    # The old settings first: alone the new ones leave them in a state that torch refuses to read.
    matmul.allow_tf32 = cudnn.allow_tf32 = rounds
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if rounds else "ieee"


def _settings_of(module: Any) -> Any:
    """torch replaces these modules by objects with more attributes than types know."""
    return module


def image_format(device: torch.device, precision: str) -> torch.memory_format:
    """In which order a batch of images lies in memory: channels last, but for float32 convolutions on a GPU.

    cuDNN's kernels for channels last are those of tensor cores; in float32 they can be several times slower than those
    for contiguous images (pytorch#44943, pytorch#191945).
    """
    return torch.contiguous_format if device.type == "cuda" and precision != "tf32" else torch.channels_last


def spare_memory(device: torch.device, environment: Environment) -> int:
    """Bytes of a GPU that this rank may fill with what it could also make again; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    sharing = -(-environment.local_num_ranks // max(torch.cuda.device_count(), 1))
    return int(_SPARE_SHARE * free / sharing)


def gpu_names(device: torch.device) -> tuple[str, str]:
    """The unique name of a GPU, or of a slice (MIG) of one; and its place on the bus, which slices share."""
    if device.type != "cuda":
        return "", ""
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    on_bus = "" if None in place else ":".join(f"{number:02x}" for number in place)
    return str(getattr(properties, "uuid", "")), on_bus


def has_kernels_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a build of torch for `sm_80`, `sm_90a`, `compute_90` and the like runs on a GPU of a capability.

    Kernels run on the same major capability from their minor one on; `compute_` ones are compiled for any later one;
    those with a letter run on no other.
    """
    major, minor = capability
    for name in built_for:
        kind, _, version = name.partition("_")
        digits = version.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdecimal():
            continue
        theirs = int(digits[:-1]), int(digits[-1])
        if digits != version and theirs != capability:
            continue
        same_major = theirs[0] == major and theirs[1] <= minor
        if same_major or (kind == "compute" and theirs <= capability):
            return True
    return False


def gpu_problem(device: torch.device) -> str:
    """What keeps a GPU that is visible from computing; empty where a step of a model ran, and on CPUs."""
    if device.type != "cuda":
        return ""
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not has_kernels_for(capability, built_for):
        return (
            f"{torch.cuda.get_device_name(device)} has capability {capability[0]}.{capability[1]}, and torch "
            f"{torch.__version__} has kernels for {', '.join(built_for) or 'none'}"
        )
    try:
        _step(device)
    except RuntimeError as error:
        return f"a step on {torch.cuda.get_device_name(device)} fails: {str(error).strip().splitlines()[0]}"
    return ""


def _step(device: torch.device) -> None:
    """A convolution, a matrix product, their gradients and what comes back."""
    images = torch.ones(2, 3, 8, 8, device=device)
    kernel = torch.ones(4, 3, 3, 3, device=device, requires_grad=True)
    weight = torch.ones(4, 2, device=device, requires_grad=True)
    total = (conv2d(images, kernel).sum((2, 3)) @ weight).sum()
    gradients = torch.autograd.grad(total, (kernel, weight))
    # Linear in the kernel and in the weight, which are ones: either gradient adds up to the total.
    found = [float(part.detach().sum()) for part in (total, *gradients)]
    if found != [2 * 36 * 27 * 4 * 2] * 3:
        raise RuntimeError(f"wrong numbers come back: {found}")
