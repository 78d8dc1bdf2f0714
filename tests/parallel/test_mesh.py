"""Which rank is where, and what is said to sizes that do not fit. No process but this one runs."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.errors import LayoutError
from actmem.parallel import Mesh, MeshSizes, build_mesh
from actmem.parallel.mesh import Axis

AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "tp")
FEW = st.integers(1, 3)


def ranks_of(sizes: MeshSizes) -> list[Mesh]:
    count = sizes.pp_size * sizes.dp_replicate_size * sizes.dp_shard_size * sizes.tp_size
    return [Mesh(sizes, rank, None, None) for rank in range(count)]


@given(FEW, FEW, FEW, FEW)
def test_each_rank_has_a_place_of_its_own_with_tensor_parallel_innermost(
    pp: int, copies: int, shards: int, tp: int
) -> None:
    meshes = ranks_of(MeshSizes(copies, shards, tp, pp))
    places = [tuple(mesh.rank_of(axis) for axis in AXES) for mesh in meshes]
    assert places == sorted(set(places))
    assert {mesh.size(axis) for mesh in meshes for axis in ("dp_replicate",)} == {copies}
    assert len({(mesh.rank_of("pp"), mesh.rank_of("tp"), mesh.data_rank) for mesh in meshes}) == len(meshes)
    assert {mesh.data_rank for mesh in meshes} == set(range(copies * shards))


@given(FEW, FEW, FEW, FEW)
def test_experts_cut_the_shards_once_more(pp: int, copies: int, rest: int, ep: int) -> None:
    meshes = ranks_of(MeshSizes(copies, rest * ep, 1, pp, ep))
    for mesh in meshes:
        assert mesh.rank_of("dp_shard_of_experts") * ep + mesh.rank_of("ep") == mesh.rank_of("dp_shard")
    assert {mesh.rank_of("ep") for mesh in meshes} == set(range(ep))
    assert meshes[0].size("dp_shard_of_experts") == rest


def test_one_process_needs_no_process_group() -> None:
    mesh = build_mesh(MeshSizes(), "cpu")
    assert mesh.data_groups == ()
    assert (mesh.data_size, mesh.data_rank) == (1, 0)
    assert mesh.sub("tp") is None and mesh.sub("ep") is None and mesh.group("pp") is None


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (MeshSizes(dp_shard_size=2), ("dp_shard_size 2", "is 2 ranks, and 1 run")),
        (MeshSizes(2, 2, 2, 2), ("dp_replicate_size 2 x dp_shard_size 2 x tp_size 2 x pp_size 2 is 16 ranks",)),
        (MeshSizes(ep_size=2), ("ep_size 2 does not divide dp_shard_size 1",)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else "-".join(map(str, asdict(value).values())),
)
def test_sizes_that_do_not_fit_are_refused(sizes: MeshSizes, parts: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError) as caught:
        build_mesh(sizes, "cpu")
    assert all(part in str(caught.value) for part in parts)
