
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensorMode",
    "allocations",
    "below_autograd",
    "dispatch_off",
    "dtensor_functions",
    "flop_registry",
    "is_compiled",
    "is_fake",
    "local_storage",
    "storage_id",
]

dispatch_off = torch._C._DisableTorchDispatch
"""Context in which no dispatch mode and no tensor subclass sees an op."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which ops run as autograd itself calls them: nothing is recorded for a backward pass."""


def is_fake(kind: type) -> bool:
    """Whether a tensor type is torch's fake tensor (shape and dtype without memory)."""
    return issubclass(kind, FakeTensor)


def local_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage that holds a tensor's numbers on this rank: for a DTensor, that of its local part."""
    while type(tensor) is not torch.Tensor:
        inner: Any = getattr(tensor, "_local_tensor", None)
        inner = getattr(tensor, "elem", None) if inner is None else inner
        if inner is None:
            break
        tensor = inner
    return tensor.untyped_storage()


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is the same for two living tensors exactly when they share a storage."""
    return int(local_storage(tensor)._cdata)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was given to `torch.compile`, wrapped or in place."""
    return module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)


def dtensor_functions() -> tuple[type[torch.autograd.Function], ...]:
    """DTensor's own autograd Functions: their forwards run nothing but ATen ops and functional collectives."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor._api import _FromTorchTensor, _ToTorchTensor
    from torch.distributed.tensor._redistribute import Redistribute

    return (Redistribute, _ToTorchTensor, _FromTorchTensor)


def allocations(profiled: torch.profiler.profile) -> list[tuple[int, int]]:
    """Time (ns) and size of each allocation that a finished profile saw, in order of time; negative where memory was
    given back."""
    results = profiled.profiler.kineto_results if profiled.profiler is not None else None
    assert results is not None, "the profile has not been stopped"
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    return sorted(events, key=lambda event: event[0])
