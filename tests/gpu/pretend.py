"""A GPU without one: real code and real numbers on a CPU, with tensors that say they are on `cuda:0`.

Every ATen operation, those of the backward pass too, comes by `PretendedGpu`, which raises where CUDA would refuse it
and counts, by the line of the package that asked, kernels launched, waits of the host and random numbers drawn on the
GPU. Not modelled: streams, races, and what kernels' own bits and times are.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.gpu.cuda_rules import RANDOM, Call, aten, is_collective, launches, refusal, wait

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
FREE_BYTES = 100 * 2**30
# C++ takes the tensors for those of a backend that needs no hardware. Were they "cuda" for it as well, the autograd
# engine would ask for contexts and streams of a GPU.
_BACKEND = "pretended"
_setup_privateuseone_for_python_backend(_BACKEND)


class OnGpu(Tensor):
    """`memory`, a CPU tensor, that says it is on a GPU."""

    memory: Tensor
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[OnGpu], memory: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device(_BACKEND, 0),
        )
        made.memory = memory
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OnGpu({self.memory})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin: Any = OnGpu(self.memory.clone())
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        memo[id(self)] = twin
        return twin

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of the pretended GPU was used outside of `machine`")


class PretendedGpu(TorchDispatchMode):
    """Carries out every operation on the memory behind its tensors.

    `forbid_waits` makes a wait an error, where it is made; `over_nccl` makes one of what NCCL would not take.
    """

    def __init__(self, over_nccl: bool) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch then starts no CUDA for device="cuda"
        self.launches: Counter[str] = Counter()  # by line
        self.waits: Counter[tuple[str, str]] = Counter()  # by reason and line
        self.draws: Counter[str] = Counter()  # by line
        self.errors: list[str] = []
        self.forbid_waits = False
        self._over_nccl = over_nccl
        self._late = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.raise_late()
        kwargs = dict(kwargs or {})
        if func.overloadpacket in (aten.is_pinned, aten._pin_memory):
            return self._pinned(func.overloadpacket, args[0])
        leaves, form = tree_flatten((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, OnGpu)]
        hosts = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, OnGpu)]
        target = kwargs.get("device")
        on_gpu = bool(ours) if target is None else torch.device(target).type in ("cuda", _BACKEND)
        call = Call(func, args, kwargs, ours, hosts, on_gpu)
        if ours or on_gpu or is_collective(call):
            self._judge(call)
        known = {id(tensor.memory): tensor for tensor in ours} | {id(tensor): tensor for tensor in hosts}
        leaves = [leaf.memory if isinstance(leaf, OnGpu) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, form)
        if target is not None and on_gpu:
            kwargs["device"] = HOST
        # Zeros without memory have a dispatch key that the wrapper would hide.
        result = (aten.zeros.default if func.overloadpacket is aten._efficientzerotensor else func)(*args, **kwargs)

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else OnGpu(leaf) if on_gpu else leaf

        return wrapped(result) if isinstance(result, Tensor) else tree_map(wrapped, result)

    def synchronize(self, device: Any = None) -> None:
        self._wait("synchronize")

    def event(self, **options: Any) -> Any:
        """One that has happened by the time that anybody asks, which is a wait as well."""

        def query() -> bool:
            self._wait("an event")
            return True

        return SimpleNamespace(record=lambda stream=None: None, query=query, synchronize=self.synchronize)

    def raise_late(self) -> None:
        """The backward pass's C++ does not survive an exception from here: it is raised once that is over."""
        if self._late and torch._C._current_graph_task_id() == -1:
            what, self._late = self._late, ""
            raise RuntimeError(what)

    def _judge(self, call: Call) -> None:
        if reason := refusal(call, over_nccl=self._over_nccl):
            self._error(reason)
        if reason := wait(call):
            self._wait(reason)
        if count := launches(call):
            self.launches[where()] += count
        if call.name in RANDOM:
            self.draws[where()] += 1

    def _wait(self, reason: str) -> None:
        self.waits[reason, where()] += 1
        if self.forbid_waits:
            self._error(f"waits for the GPU: {reason}")

    def _error(self, what: str) -> None:
        self.errors.append(what)
        self._late = self._late or f"{what}, at {where()}"
        self.raise_late()

    def _pinned(self, packet: Any, tensor: Tensor) -> Any:
        if packet is aten.is_pinned:
            return getattr(tensor, "pretends_to_be_pinned", False)
        pinned = tensor.clone()
        pinned.pretends_to_be_pinned = True  # type: ignore[attr-defined]
        return pinned


class _DataSetter(TorchFunctionMode):
    """`parameter.data = tensor` gives the wrapper other memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__ and isinstance(args[0], OnGpu):  # type: ignore[attr-defined]
            args[0].memory = args[1].memory
        return func(*args, **(kwargs or {}))


def where() -> str:
    """`folder/file.py:line` of the package, of the innermost frame that is in it."""
    frame = sys._getframe(1)
    while frame is not None and "/fedspec_dist/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename.rpartition('/fedspec_dist/')[2]}:{frame.f_lineno}" if frame else "outside"


@contextlib.contextmanager
def machine(*, over_nccl: bool = False) -> Iterator[PretendedGpu]:
    """A machine with one GPU, for as long as this is open."""
    gpu = PretendedGpu(over_nccl)
    facts = SimpleNamespace(uuid="GPU-0", name="pretended", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=0: facts,
        "get_device_name": lambda device=0: facts.name,
        "get_device_capability": lambda device=0: (9, 0),
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "mem_get_info": lambda device=0: (FREE_BYTES, FREE_BYTES),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: SimpleNamespace(synchronize=gpu.synchronize),
        "Event": gpu.event,
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda device=0: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=0: torch.default_generator.set_state(state),
        "synchronize": gpu.synchronize,
        "_lazy_call": lambda *args, **kwargs: None,
    }
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch.multiple(torch.cuda, **pretended),
            torch.autograd.set_multithreading_enabled(False),
            _DataSetter(),
            gpu,
        ):
            yield gpu
            gpu.raise_late()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)
        _forget_tables()


def _forget_tables() -> None:
    """What the package keeps by device must not come to a real GPU, nor to another machine."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fedspec_dist."):
            for kept in vars(module).values():
                if hasattr(kept, "cache_clear") and getattr(kept, "__module__", "") == name:
                    kept.cache_clear()
