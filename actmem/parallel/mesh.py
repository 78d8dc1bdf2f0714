"""The ranks of a run by what they share: copies of the model, shards of it, tensors, experts, pipeline stages.

Ranks are numbered with the tensor parallel ones innermost, since they speak most, then shards, copies and, outermost,
pipeline stages. Experts spread over `ep` ranks cut the shards once more: rank ``s`` among the shards is rank ``s % ep``
among those that share the experts, and ``s // ep`` among those that shard what is left of each expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actmem.errors import LayoutError

Axis = Literal["pp", "dp_replicate", "dp_shard", "tp", "dp_shard_of_experts", "ep"]


class Sizes(Protocol):
    """What a layout needs to know: the section `parallel` of a configuration, or a `MeshSizes`."""

    @property
    def dp_replicate_size(self) -> int: ...
    @property
    def dp_shard_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def ep_size(self) -> int: ...


@dataclass(frozen=True)
class MeshSizes:
    """`Sizes` as plain numbers."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, seen from this one.

    `dense` spans all of them by ``pp``, ``dp_replicate``, ``dp_shard`` and ``tp``, `sparse` by ``pp``,
    ``dp_replicate``, ``dp_shard_of_experts`` and ``ep``, for the experts; both leave out what has one rank alone.
    """

    sizes: MeshSizes
    rank: int
    dense: DeviceMesh | None
    sparse: DeviceMesh | None

    def size(self, axis: Axis) -> int:
        """Number of ranks along an axis."""
        shards, ep = self.sizes.dp_shard_size, self.sizes.ep_size
        sizes = {"pp": self.sizes.pp_size, "dp_replicate": self.sizes.dp_replicate_size, "tp": self.sizes.tp_size}
        return (sizes | {"dp_shard": shards, "ep": ep, "dp_shard_of_experts": shards // ep})[axis]

    def rank_of(self, axis: Axis) -> int:
        """This rank's number along an axis."""
        if axis in ("ep", "dp_shard_of_experts"):
            shard = self.rank_of("dp_shard")
            return shard % self.size("ep") if axis == "ep" else shard // self.size("ep")
        inner: tuple[Axis, ...] = ("tp", "dp_shard", "dp_replicate", "pp")
        below = [self.size(each) for each in inner[: inner.index(axis)]]
        return self.rank // math.prod(below) % self.size(axis)

    def sub(self, *axes: Axis) -> DeviceMesh | None:
        """The mesh of the ranks that differ from this one along these axes alone; ``None`` for this rank by itself."""
        mesh = self.sparse if set(axes) & _SPARSE else self.dense
        found = tuple(axis for axis in axes if mesh is not None and axis in (mesh.mesh_dim_names or ()))
        return mesh[found] if mesh is not None and found else None

    def group(self, axis: Axis) -> distributed.ProcessGroup | None:
        """The process group of the ranks along an axis; ``None`` for this rank by itself."""
        mesh = self.sub(axis)
        return None if mesh is None else mesh.get_group()

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of them, that each read data of their own."""
        return self.sizes.dp_replicate_size * self.sizes.dp_shard_size

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` parts of the data this rank reads."""
        return self.rank_of("dp_replicate") * self.sizes.dp_shard_size + self.rank_of("dp_shard")

    @property
    def data_groups(self) -> tuple[distributed.ProcessGroup, ...]:
        """Groups to sum over, one after the other, for a sum over all ranks with data of their own."""
        groups = (self.group("dp_shard"), self.group("dp_replicate"))
        return tuple(group for group in groups if group is not None)


_SPARSE = {"ep", "dp_shard_of_experts"}


def build_mesh(sizes: Sizes, device_type: str) -> Mesh:
    """The mesh of an initialised process group; of this process alone where `sizes` are all one.

    Raises `LayoutError` for sizes whose product is not the number of ranks, and experts that do not divide the shards.
    """
    plain = MeshSizes(sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.pp_size, sizes.ep_size)
    initialised = distributed.is_available() and distributed.is_initialized()
    world_size = distributed.get_world_size() if initialised else 1
    _check(plain, world_size)
    if world_size == 1:
        return Mesh(plain, 0, None, None)
    # A group of size one is there only where FSDP2 needs two dimensions, one that copies and one that shards.
    copies = plain.dp_replicate_size > 1
    dense = {
        "pp": plain.pp_size,
        "dp_replicate": plain.dp_replicate_size,
        "dp_shard": plain.dp_shard_size,
        "tp": plain.tp_size,
    }
    sparse = {
        "pp": plain.pp_size,
        "dp_replicate": plain.dp_replicate_size,
        "dp_shard_of_experts": plain.dp_shard_size // plain.ep_size,
        "ep": plain.ep_size,
    }
    return Mesh(
        plain,
        distributed.get_rank(),
        _device_mesh(device_type, dense, keep="dp_shard" if copies and plain.tp_size > 1 else None),
        _device_mesh(device_type, sparse, keep="dp_shard_of_experts" if copies else None)
        if plain.ep_size > 1
        else None,
    )


def _device_mesh(device_type: str, sizes: dict[str, int], keep: str | None) -> DeviceMesh:
    kept = {name: size for name, size in sizes.items() if size > 1 or name == keep}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _check(sizes: MeshSizes, world_size: int) -> None:
    named = {
        "dp_replicate_size": sizes.dp_replicate_size,
        "dp_shard_size": sizes.dp_shard_size,
        "tp_size": sizes.tp_size,
        "pp_size": sizes.pp_size,
    }
    if math.prod(named.values()) != world_size:
        product = " x ".join(f"{name} {size}" for name, size in named.items())
        raise LayoutError(
            f"{product} is {math.prod(named.values())} ranks, and {world_size} run; start as many as the product says "
            "(torchrun --nproc-per-node), or mend the sizes"
        )
    if sizes.ep_size > 1 and sizes.tp_size > 1:
        raise LayoutError(
            f"ep_size {sizes.ep_size} with tp_size {sizes.tp_size}: experts are spread over the tensor parallel ranks "
            "then; set ep_size: 1"
        )
    if sizes.dp_shard_size % sizes.ep_size:
        raise LayoutError(
            f"ep_size {sizes.ep_size} does not divide dp_shard_size {sizes.dp_shard_size}; experts are spread over "
            "that many of the shards' ranks"
        )
