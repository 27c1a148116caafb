"""What CUDA would say of an ATen operation: refuse it, wait for the GPU, or launch so many kernels.

Facts of torch 2.14, read in `aten/src/ATen/native/cuda` and in the list of `torch.use_deterministic_algorithms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten, c10d = torch.ops.aten, torch.ops.c10d


@dataclass(frozen=True)
class Call:
    """An operation and where its tensors are."""

    operation: Any  # an OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    on_gpu: Sequence[Tensor]
    on_host: Sequence[Tensor]
    result_on_gpu: bool

    @property
    def name(self) -> Any:
        """The operation without its overload."""
        return self.operation.overloadpacket


COPIES = {aten._to_copy, aten.copy_, aten._foreach_copy_}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# The host asks what came out, be it a number or a size.
ASKING = {
    aten._local_scalar_dense,
    aten._linalg_check_errors,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.linalg_lstsq,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten.unique_consecutive,
    aten.unique_dim,
}
RANDOM = {
    aten.bernoulli,
    aten.bernoulli_,
    aten.multinomial,
    aten.native_dropout,
    aten.normal,
    aten.normal_,
    aten.rand,
    aten.rand_like,
    aten.randint,
    aten.randn,
    aten.randn_like,
    aten.randperm,
    aten.uniform_,
}
# Those that have an ATen name of their own; scatter_add and the like have deterministic kernels.
NOT_DETERMINISTIC = {
    aten._adaptive_avg_pool2d_backward,
    aten._adaptive_avg_pool3d_backward,
    aten._ctc_loss_backward,
    aten._embedding_bag_backward,
    aten.adaptive_max_pool2d_backward,
    aten.avg_pool3d_backward,
    aten.fractional_max_pool2d_backward,
    aten.grid_sampler_2d_backward,
    aten.histc,
    aten.kthvalue,
    aten.max_unpool2d,
    aten.median,
    aten.nanmedian,
    aten.nll_loss2d_forward,
    aten.put,
    aten.put_,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.upsample_bicubic2d_backward,
    aten.upsample_bilinear2d_backward,
}
# Others launch one; views and memory that is left as it is none.
KERNELS = {
    aten._fft_c2r: 2,
    aten._fft_r2c: 2,
    aten._linalg_eigh: 60,
    aten._unsafe_view: 0,
    aten.convolution_backward: 2,
    aten.empty: 0,
    aten.empty_like: 0,
    aten.lift_fresh: 0,
    aten.linalg_qr: 60,
    aten.native_group_norm: 3,
    aten.native_group_norm_backward: 6,
    aten.new_empty: 0,
}


def is_collective(call: Call) -> bool:
    return call.operation.namespace == "c10d"


def refusal(call: Call, *, over_nccl: bool) -> str:
    """Why CUDA, or NCCL, would not do it; empty where it would."""
    if is_collective(call):
        if over_nccl and call.on_host:
            return f"NCCL got a tensor on the host: {call.operation}"
        if over_nccl and not all(tensor.is_contiguous() for tensor in call.on_gpu):
            return f"NCCL got a tensor that is not contiguous: {call.operation}"
        return ""
    if torch.are_deterministic_algorithms_enabled() and call.name in NOT_DETERMINISTIC and call.on_gpu:
        return f"{call.operation} has no deterministic kernel"
    # Numbers and indices may come from the host (these wait); copies are there to cross.
    crosses = call.name in COPIES or call.name in INDEXING or call.name is aten.lift_fresh
    if call.on_gpu and not crosses and any(tensor.dim() for tensor in call.on_host):
        return f"{call.operation}: tensors on the GPU and on the host"
    return ""


def wait(call: Call) -> str:
    """For what the host would wait; empty where it would not."""
    if call.name in COPIES:
        if not call.result_on_gpu:
            return "a copy to the host" if call.on_gpu else ""
        later = call.kwargs.get("non_blocking") or (len(call.args) > 2 and call.args[2] is True)
        if not call.on_host or (
            later and all(getattr(tensor, "pretends_to_be_pinned", False) for tensor in call.on_host)
        ):
            return ""
        return "a copy from pageable memory"
    if call.name in INDEXING:
        indices = [index for index in tree_leaves(call.args[1]) if isinstance(index, Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "an index by a mask"
        return "an index from the host" if any(index is host for index in indices for host in call.on_host) else ""
    return call.name.__name__ if call.name in ASKING and call.on_gpu else ""


def launches(call: Call) -> int:
    """How many kernels, counting a fill of memory that would otherwise be left as it is."""
    if not call.result_on_gpu or is_collective(call):
        return 0
    returns_view = any(a.alias_info is not None and not a.alias_info.is_write for a in call.operation._schema.arguments)
    if returns_view:
        return 0
    return KERNELS.get(call.name, 1)
