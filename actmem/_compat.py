"""The only place that tests torch's or transformers' version, or touches one of their private names."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry as torch_flop_registry

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "DEVICE_QUESTION",
    "OWN_BUFFERS",
    "DispatchMode",
    "FakeTensorMode",
    "LifelikeFakes",
    "OpOverload",
    "TorchDispatchMode",
    "allocations",
    "answer_device",
    "asked_by_python_function",
    "async_collective_types",
    "below_autograd",
    "count_versions_together",
    "dispatch_off",
    "dtensor_functions",
    "end_process",
    "exchange",
    "flop_registry",
    "forget_micro_batches",
    "give_back_free_memory",
    "inside",
    "is_caching_casts",
    "is_compiled",
    "is_compiler_watching",
    "is_fake",
    "is_profiling",
    "local_storage",
    "raw_call",
    "size_of_group",
    "stack_of",
    "storage_bytes",
    "storage_id",
    "storage_reference",
    "store_connection",
    "wrapping",
]

end_process = os._exit
"""End the process at once, without the interpreter's clearing up."""

dispatch_off = torch._C._DisableTorchDispatch
"""Context in which no dispatch mode and no tensor subclass sees an op."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which ops run as autograd itself calls them: nothing is recorded for a backward pass."""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose handler is called directly. Torch wraps handlers so that its compiler stays out of them,
    which costs about 2 µs an op and is of no use where compiled models are refused."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def raw_call(func: Any) -> Callable[..., Any]:
    """What an op overload calls, without the Python frame around it."""
    call: Callable[..., Any] = getattr(func, "_op", func)
    return call


def _grouped_mm_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Multiplications and additions of a grouped matmul: each row of `left` meets the matrix of one group."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])


flop_registry = {torch.ops.aten._grouped_mm: _grouped_mm_flops, **torch_flop_registry}
"""Formulas for the FLOPs of matmul-like ops; torch's own leave out the grouped ones that experts run."""

DATA_DEPENDENT_ERRORS = (DynamicOutputShapeException, DataDependentOutputException)
"""What fake tensors raise where the next op depends on numbers that they do not have."""


OWN_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)
"""What has DDP leave each rank's buffers alone."""


def is_caching_casts() -> bool:
    """Whether autocast keeps what it casts parameters to, until its context ends."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds))


def is_profiling() -> bool:
    """Whether a profile is being taken, beside which there can be no other."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


def bfloat16_scratch() -> float:
    """Bytes that a product of bfloat16 takes on this CPU for each byte of its result, while it runs: without
    instructions of its own for them, oneDNN sums up in a float32 copy."""
    cpu: Any = torch.ops.mkldnn
    sums_up_elsewhere = cpu._is_mkldnn_bf16_supported() and not torch.cpu._is_avx512_bf16_supported()
    return 2.0 if sums_up_elsewhere else 0.0


DEVICE_QUESTION = torch.ops.prim.device.default
"""Fake tensors answer what device they are on by an op of its own, which real ones do not run. It is asked more often
than all other ops together."""


def answer_device(tensor: Any) -> torch.device:
    """The answer, straight from a fake tensor."""
    device: torch.device = tensor.fake_device
    return device


_WAIT = torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None


class LifelikeFakes(DispatchMode):
    """Has fake tensors do as real ones do, where torch's rules for them do not. Its kernels take more dtypes into a
    grouped matmul than its rule for the shape of the result, which knows bfloat16 alone; and waiting for a collective
    gives the tensor that was waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUESTION:
            return answer_device(args[0])
        if func is _WAIT:
            return args[0]
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs)
        left, right, *others = args
        return func(left.bfloat16(), right.bfloat16(), *others, **kwargs).to(left.dtype)


def is_fake(kind: type) -> bool:
    """Whether a tensor type is torch's fake tensor (shape and dtype without memory)."""
    return issubclass(kind, FakeTensor)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view that says that its numbers are to be negated."""
    return torch._neg_view(tensor)


def is_ragged(kind: type) -> bool:
    """Whether a tensor type is torch's nested one of the jagged layout."""
    return issubclass(kind, NestedTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds a tensor's numbers on this rank: for a DTensor, its local part."""
    while type(tensor) is not torch.Tensor:
        inner = inside(tensor)
        if inner is None:
            break
        tensor = inner
    return tensor


def local_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage that holds a tensor's numbers on this rank."""
    return local_part(tensor).untyped_storage()


def likeness(tensor: torch.Tensor) -> Callable[[torch.device | None], torch.Tensor]:
    """A function that makes tensors with the shape, strides and dtype of this one, on its device or another, without
    numbers; of a DTensor, with the placement as well. It does not hold the tensor."""
    inner = inside(tensor)
    if inner is not None:
        make, wrap = likeness(inner), wrapping(tensor)
        return lambda device: wrap(make(device))
    shape, stride, dtype, own = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return lambda device: torch.empty_strided(shape, stride, dtype=dtype, device=device or own)


def inside(tensor: Any) -> torch.Tensor | None:
    """The tensor inside a DTensor or inside a collective's result that nobody has waited for yet."""
    inner: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return getattr(tensor, "elem", None) if inner is None else inner


def wrapping(like: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that puts another tensor inside such a subclass, as one is inside `like`."""
    kind, spec = type(like), getattr(like, "_spec", None)
    if spec is None:
        return lambda inner: kind(inner)
    return lambda inner: kind(inner, spec, requires_grad=False)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is the same for two living tensors exactly when they share a storage. Sparse tensors have none."""
    return id(tensor) if tensor.layout is not torch.strided else int(local_storage(tensor)._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage behind a tensor, all of it; behind the numbers in a sparse or ragged one."""
    if tensor.layout is not torch.strided:
        with nullcontext() if tensor.is_nested else dispatch_off():  # to ask is an op
            numbers = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        return numbers.untyped_storage().nbytes()
    return local_storage(tensor).nbytes()


def storage_reference(tensor: torch.Tensor) -> object:
    """Something that keeps a storage's `storage_id` from being given to another storage, but not its memory."""
    return StorageWeakRef(tensor.untyped_storage())


def count_versions_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an in-place edit of one counts for both; views that torch does not know to be views count alone."""
    before = other._version
    with preserve_versions(one):
        torch.autograd.graph.increment_version(one)
        return other._version != before


def asked_by_python_function() -> bool:
    """Whether the backward of a Python `torch.autograd.Function` is what runs now."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was given to `torch.compile`, wrapped or in place."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def is_compiler_watching() -> bool:
    """Whether torch's compiler looks at the frames that run now."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def spread_over(parameters: Iterable[torch.Tensor]) -> str | None:
    """Over which meshes of ranks parameters are spread, such as ``ep 4``; ``None`` where all are whole."""
    meshes = [getattr(each, "device_mesh", None) for each in parameters]
    sizes = {
        (name, mesh.size(dimension))
        for mesh in meshes
        if mesh is not None
        for dimension, name in enumerate(mesh.mesh_dim_names or ())
        if not name.startswith("dp_")
    }
    return ", ".join(f"{name} {size}" for name, size in sorted(sizes)) or None


def async_collective_types() -> tuple[type[torch.Tensor], ...]:
    """The tensor subclass that stands for a collective's result until somebody reads it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return (AsyncCollectiveTensor,)


def dtensor_functions() -> tuple[type[torch.autograd.Function], ...]:
    """DTensor's own autograd Functions: their forwards run nothing but ATen ops and functional collectives."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor._api import _FromTorchTensor, _ToTorchTensor
    from torch.distributed.tensor._redistribute import Redistribute

    return (Redistribute, _ToTorchTensor, _FromTorchTensor)


def exchange(
    rows: torch.Tensor, received: list[int], sent: list[int], group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """Send `sent[i]` rows to rank i of a group, in order, for `received[i]` of its own; gradients go the other way."""
    from torch.distributed import _functional_collectives as collectives

    if rows.requires_grad:
        out = collectives.all_to_all_single_autograd(rows, received, sent, group)
    else:
        out = collectives.all_to_all_single(rows, received, sent, group)
    return out


def pretended_store() -> Any:
    """The store of a process group whose ranks are not there; the backend ``fake`` comes with it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def store_connection(prefix: str) -> Any:
    """One more connection to the store through which the processes of the default group found each other. A connection
    on which one thread waits is no use to another. `prefix` keeps its keys apart from all others."""
    groups: Any = torch.distributed.distributed_c10d
    return groups.PrefixStore(prefix, groups._get_default_store().clone())


def stack_of(thread: int) -> traceback.StackSummary:
    """Where a thread is."""
    return traceback.extract_stack(sys._current_frames().get(thread))


def forget_micro_batches(schedule: Any, stages: Iterable[Any]) -> None:
    """Let go of what a pipeline schedule and its stages still have of a step, which else stays until the next one."""
    schedule._internal_losses.clear()
    for stage in stages:
        stage.clear_runtime_states()
        for left in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            left.clear()


def size_of_group(name: str) -> int:
    """Number of ranks in the process group of this name; 0 where the name is not one's."""
    groups: Any = torch.distributed.distributed_c10d
    try:
        return int(groups._resolve_process_group(name).size())
    except (RuntimeError, ValueError):
        return 0


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def give_back_free_memory() -> None:
    """Let glibc, where that is the C library, return freed memory to the kernel."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def allocations(profiled: torch.autograd.profiler.profile) -> list[tuple[int, int]]:
    """Time (ns) and size of each allocation that a finished profile saw, in order of time; negative where memory was
    given back."""
    events = [(event.start_ns(), event.nbytes()) for event in _events(profiled) if event.name() == "[memory]"]
    return sorted(events, key=lambda event: event[0])


def spans_of(profiled: torch.autograd.profiler.profile, prefix: str) -> list[tuple[int, int]]:
    """Begin and end (ns) of what a finished profile saw under names that start like this, in order of time."""
    events = (event for event in _events(profiled) if event.name().startswith(prefix))
    return sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events)


def _events(profiled: torch.autograd.profiler.profile) -> Any:
    results: Any = profiled.kineto_results
    assert results is not None, "the profile is not over"
    return results.events()
