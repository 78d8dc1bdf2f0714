"""Data parallel: ranks with data of their own, each with a copy of the model (DDP), a shard of it (FSDP2), or both.

The loss of a rank is its share of the mean over all ranks' tokens. So gradients are summed over the ranks, never
averaged, by each of the three.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from actmem._compat import OWN_BUFFERS
from actmem.errors import LayoutError
from actmem.models.regions import find_regions
from actmem.parallel.mesh import Mesh
from actmem.parallel.tensor import has_experts


def shard_data(model: nn.Module, mesh: Mesh, *, reshard_after_forward: bool = True) -> nn.Module:
    """Lay `model` out over the ranks with data of their own; returns the module to call.

    That is the model itself, except for plain copies, where it is DDP around the model. Only calls of that module, not
    of a part of it, run under FSDP2 and DDP. With `reshard_after_forward` a layer's parameters are gathered once more
    for its backward pass. Raises `LayoutError` for a model that is laid out already.
    """
    if isinstance(model, DistributedDataParallel) or any(isinstance(each, FSDPModule) for each in model.modules()):
        raise LayoutError(
            f"{type(model).__name__} is laid out over data parallel ranks already; start from a fresh model"
        )
    if mesh.data_size == 1:
        return model
    ranks = mesh.sub("dp_replicate", "dp_shard")
    assert ranks is not None
    if mesh.size("dp_shard") == 1 and mesh.size("tp") == 1:
        return _copy(model, ranks)
    _shard(model, mesh, ranks, reshard_after_forward)
    return model


def _copy(model: nn.Module, ranks: DeviceMesh) -> nn.Module:
    copies = DistributedDataParallel(
        model, process_group=ranks.get_group(), gradient_as_bucket_view=True, **OWN_BUFFERS
    )
    # DDP compares annotations with types, and ours are strings; a lambda has none.
    copies.register_comm_hook(ranks.get_group(), lambda group, bucket: _sum(group, bucket))
    return copies


def _sum(group: distributed.ProcessGroup, bucket: Any) -> Future[Tensor]:
    work: Any = distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    done: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return done


def _shard(model: nn.Module, mesh: Mesh, ranks: DeviceMesh, reshard_after_forward: bool) -> None:
    kept = set[nn.Parameter]()
    for layer in find_regions(model).values():
        if mesh.size("ep") > 1 and has_experts(layer):
            kept |= _shard_experts(layer.mlp, mesh, reshard_after_forward)
        fully_shard(layer, mesh=ranks, reshard_after_forward=reshard_after_forward, ignored_params=kept)
    fully_shard(model, mesh=ranks, ignored_params=kept)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise it would be a sum of products with one, which only NCCL has.
            module.set_force_sum_reduction_for_comms(True)


def _shard_experts(mixture: Any, mesh: Mesh, reshard_after_forward: bool) -> set[nn.Parameter]:
    """Shard experts that are spread over the ranks already; returns their parameters if there is no more to do."""
    experts: nn.Module = mixture.experts
    assert all(isinstance(each, DTensor) for each in experts.parameters())
    ranks = mesh.sub("dp_replicate", "dp_shard_of_experts")
    if ranks is None:
        return set(experts.parameters())
    fully_shard(experts, mesh=ranks, reshard_after_forward=reshard_after_forward)
    return set()
