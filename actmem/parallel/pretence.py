"""A mesh of ranks that are not there, to lay a model without numbers out as one of many ranks would have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from actmem._compat import pretended_store
from actmem.parallel.mesh import Mesh, MeshSizes, Sizes, build_mesh


@contextmanager
def pretended_mesh(sizes: Sizes) -> Iterator[Mesh]:
    """The mesh of the ranks that share the tensors and experts of one stage, as the first of them sees it.

    Data goes over it nowhere; collectives on tensors without numbers need none. A process that is one of real ranks has
    a mesh already, and takes that.
    """
    inner = MeshSizes(dp_shard_size=sizes.ep_size, tp_size=sizes.tp_size, ep_size=sizes.ep_size)
    if inner == MeshSizes():
        yield Mesh(inner, 0, None, None)
        return
    world_size = inner.dp_shard_size * inner.tp_size
    distributed.init_process_group("fake", store=pretended_store(), rank=0, world_size=world_size)
    try:
        yield build_mesh(inner, "cpu")
    finally:
        distributed.destroy_process_group()
