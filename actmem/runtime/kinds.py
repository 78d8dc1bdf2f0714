"""What kind of op an ATen call is: may it be replayed, and if not, why must its outputs be saved?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from actmem._compat import (
    OpOverload,
    async_collective_types,
    flop_registry,
    is_fake,
    is_ragged,
    local_part,
    raw_call,
    size_of_group,
)
from actmem.graph import COMMUNICATION

EDITED = "edited in place"
RANDOM = "random"
NON_DETERMINISTIC = "non-deterministic"
INTEGER = "integer or bool"
UNINITIALISED = "uninitialised memory"
OPAQUE = "opaque autograd.Function"
SUBCLASS = "unregistered tensor subclass"
SPARSE = "sparse layout"
UNSEEN = "reached without an op"
VOLATILE = "made from a buffer that the region edits"
LEAVES_SHARD = "leaves a module that FSDP2 shards by itself"

# Operands that kernels write although the schema says that they do not: all that a run over torch's operator database
# found on the CPU, and their siblings on other devices (docs/decisions/0002-hidden-edits.md).
_HIDDEN_EDITS = {
    name: {"running_mean", "running_var"}
    for name in ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
}
# These run op by op below the level that counts versions, while a dispatch mode is on.
_UNCOUNTED_EDITS = ("_foreach_", "_fused_", "_amp_foreach_")
_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::empty_quantized",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_empty_affine_quantized",
}
# Outputs share an input's storage although the schema declares no alias.
_UNDECLARED_VIEWS = {
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
    "aten::lift_fresh",
    "_c10d_functional::wait_tensor",
}
# Sums whose order of addition varies on an accelerator, so that a replay could differ in the last bit.
_UNORDERED_ON_ACCELERATOR = {
    "aten::bincount",
    "aten::cumsum",
    "aten::histc",
    "aten::index_add",
    "aten::index_put",
    "aten::scatter_add",
    "aten::scatter_reduce",
}
# Its kernel does not give the same bits each time, though nothing says so.
_UNREPEATABLE = {"aten::mkldnn_rnn_layer"}
_COMMUNICATION_NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor"}
_BUILT_IN_NAMESPACES = {"aten", "prims", "prim", *_COMMUNICATION_NAMESPACES}
_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Kind:
    """The traits of one op overload.

    `name` is how paths call it; `kept` says why its outputs must be saved (``None``: they may be replayed). `edits`
    lists the operands, by position and name, that it writes; `counts_edits` says that torch then counts up their
    versions even under a dispatch mode. `custom` ops come from outside torch. `dropout` is the position of its dropout
    probability: such an op is random exactly when that is not zero. `shares_version`: torch lets the outputs count
    versions with the first operand, but only once the call has returned.
    """

    name: str
    kept: str | None
    view: bool
    edits: tuple[tuple[int, str], ...]
    compute_intensive: bool
    custom: bool
    dropout: int | None
    counts_edits: bool = True
    shares_version: bool = False

    def edited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that this call writes."""
        found: list[Tensor] = []
        for index, name in self.edits:
            operand = args[index] if index < len(args) else kwargs.get(name)
            operands = operand if isinstance(operand, (list, tuple)) else [operand]
            found.extend(each for each in operands if isinstance(each, Tensor))
        return found

    def is_random(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call draws random numbers that its kind alone does not tell of."""
        if self.dropout is None:
            return False
        probability = args[self.dropout] if len(args) > self.dropout else kwargs.get("dropout_p", 0.0)
        return bool(probability != 0.0)


@cache
def kind_of(func: OpOverload) -> Kind:
    """The kind of an op overload."""
    schema = func._schema
    qualified = str(schema.name)
    namespace, name = qualified.split("::")
    edits = _edited_operands(func, qualified)
    view = not edits and (qualified in _UNDECLARED_VIEWS or any(result.alias_info for result in schema.returns))
    custom = namespace not in _BUILT_IN_NAMESPACES
    attention = "scaled_dot_product" in name or name in {"_flash_attention_forward", "_efficient_attention_forward"}
    dropout = next((i for i, a in enumerate(schema.arguments) if a.name == "dropout_p"), None) if attention else None
    return Kind(
        name=_ATTENTION if attention else name,
        kept=None if view else _reason_to_keep(func, qualified, namespace, bool(edits), dropout is not None),
        view=view,
        edits=edits,
        compute_intensive=attention or custom or func.overloadpacket in flop_registry,
        custom=custom,
        dropout=dropout,
        counts_edits=not name.startswith(_UNCOUNTED_EDITS),
        shares_version=view and qualified not in _UNDECLARED_VIEWS,
    )


def replay_call(func: Any, kind: Kind) -> Callable[..., Any]:
    """What runs an op again. A collective has only begun when its op returns; a replay waits for it."""
    call = raw_call(func)
    return functools.partial(_issue_and_wait, call) if kind.kept == COMMUNICATION else call


def _issue_and_wait(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = call(*args, **kwargs)
    wait = torch.ops._c10d_functional.wait_tensor
    return [wait(each) for each in out] if isinstance(out, (list, tuple)) else wait(out)


def replayable_function(name: str) -> Kind:
    """The kind of a registered `torch.autograd.Function`."""
    return Kind(name, kept=None, view=False, edits=(), compute_intensive=True, custom=True, dropout=None)


def _edited_operands(func: OpOverload, qualified: str) -> tuple[tuple[int, str], ...]:
    hidden = _HIDDEN_EDITS.get(qualified, ())
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.name in hidden or (argument.alias_info and argument.alias_info.is_write)
    )


def _reason_to_keep(func: OpOverload, qualified: str, namespace: str, edits: bool, dropout: bool) -> str | None:
    if edits:
        return EDITED
    if qualified in _UNINITIALISED:
        return UNINITIALISED
    if torch.Tag.nondeterministic_seeded in func.tags and not dropout:
        return RANDOM
    if qualified in _UNORDERED_ON_ACCELERATOR and torch.accelerator.is_available():
        return NON_DETERMINISTIC
    if torch.Tag.nondeterministic_bitwise in func.tags or qualified in _UNREPEATABLE:
        return NON_DETERMINISTIC
    return COMMUNICATION if namespace in _COMMUNICATION_NAMESPACES else None


_registered_subclasses: set[type] = set()


def register_subclass(subclass: type[torch.Tensor]) -> None:
    """Let ops on a tensor subclass be replayed. They must be pure, and its ``__torch_dispatch__`` without state."""
    _registered_subclasses.add(subclass)


def are_replayable_types(types: tuple[type, ...]) -> bool:
    """Whether every tensor subclass among the operands may be replayed."""
    return all(is_fake(each) or each in _registered_subclasses or each in distributed_types() for each in types)


@cache
def hides_memory(kind: type[Tensor]) -> bool:
    """Whether a tensor subclass may hold tensors that nobody knows of."""
    has_ops_of_its_own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return has_ops_of_its_own and not (is_fake(kind) or is_ragged(kind) or kind in distributed_types())


@cache
def distributed_types() -> frozenset[type]:
    if not torch.distributed.is_available():
        return frozenset()
    from torch.distributed.tensor import DTensor

    return frozenset({DTensor, *async_collective_types()})


def num_bytes(tensor: Tensor) -> int:
    """Bytes that an op reads or writes to go once over what this rank has of a tensor."""
    return local_part(tensor).numel() * tensor.element_size()


def flops_of(func: Any, kind: Kind, args: Any, kwargs: Any, out: Any) -> int:
    """Multiplications and additions, on this rank, of a call that multiplies matrices, attends or convolves; 0 for
    others."""
    packet = getattr(func, "overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*_local_parts(args), **kwargs, out_val=_local_parts(out)))
    if kind.dropout is not None:
        backward = "backward" in str(packet)  # then the output's gradient stands before query, key and value
        batch, heads, queries, depth = args[0].shape
        return int((10 if backward else 4) * batch * heads * queries * args[2 if backward else 1].shape[2] * depth)
    return 0


def _local_parts(item: Any) -> Any:
    """What this rank has of all tensors in nested lists and tuples."""
    if isinstance(item, (list, tuple)):
        return [_local_parts(each) for each in item]
    return local_part(item) if isinstance(item, Tensor) else item


def group_size_of(kind: Kind, args: Any) -> int:
    """How many ranks take part in a collective; 0 for another op."""
    if kind.kept != COMMUNICATION:
        return 0
    return max((size_of_group(each) for each in args if isinstance(each, str)), default=0)
