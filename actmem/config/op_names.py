"""What ops are called: on the tape by their ATen name, elsewhere by more familiar ones; and a layer's input."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

INPUT = "input"
"""The path of what a layer is given, which no op in it makes."""

_ATTENTION = ("scaled_dot_product_attention",)

FAMILIAR_NAMES: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("all_gather_into_tensor",),
    "AllGather": ("all_gather_into_tensor",),
    "reduce_scatter": ("reduce_scatter_tensor",),
    "ReduceScatter": ("reduce_scatter_tensor",),
    "all_to_all": ("all_to_all_single",),
    "AllToAll": ("all_to_all_single",),
    "all_reduce": ("all_reduce",),
    "AllReduce": ("all_reduce",),
    "sdpa": _ATTENTION,
    "flash_attention": _ATTENTION,
    "FlashAttentionScore": _ATTENTION,
    "_scaled_dot_product_flash_attention": _ATTENTION,
    "_scaled_dot_product_efficient_attention": _ATTENTION,
    "_scaled_dot_product_cudnn_attention": _ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION,
    "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
}
"""A familiar name -> how the names of the ops that are meant begin; variants such as ``…_coalesced`` end otherwise.

The wait for a collective has none: it gives back the collective's own memory, about which the name of that decides."""

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "wait_tensor")
"""How the names of ops begin that speak with other ranks."""


@cache
def names_of(op_name: str) -> tuple[str, ...]:
    """The op's own name first, then its familiar ones."""
    return (op_name, *(familiar for familiar, meant in FAMILIAR_NAMES.items() if op_name.startswith(meant)))


def is_communication(op_name: str) -> bool:
    """Whether the op is a collective, one of several tensors at once included, or the wait for one."""
    return op_name.startswith(COLLECTIVES)


def split_path(path: str) -> tuple[str, str]:
    """Module (with its dot, or empty) and plain name of the op at `path`: ``mlp.mul#1`` is ``mlp.`` and ``mul``."""
    module, dot, last = path.rpartition(".")
    return module + dot, last.partition("#")[0]
