"""A model over many ranks, in the one order that holds together: tensors and experts, then the plan, then the data.

`shard_tensors` changes which ops a layer runs, so a plan has to come after it. `shard_data` gathers and frees the
parameters around whole calls of layers, so it goes outside the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from actmem.errors import LayoutError
from actmem.models.regions import find_regions
from actmem.parallel.experts import ExchangedExperts
from actmem.parallel.mesh import Mesh
from actmem.parallel.shard import shard_data
from actmem.parallel.tensor import has_experts, parallelize_tensors
from actmem.runtime.intercept import is_planned

Planned = TypeVar("Planned")


def lay_out_model(
    model: nn.Module,
    mesh: Mesh,
    apply_plan: Callable[[nn.Module], Planned],
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    reshard_after_forward: bool = True,
) -> tuple[nn.Module, Planned]:
    """Lay out a model, the same on all ranks, in place; returns the module to call and what `apply_plan` returned.

    `apply_plan` is called with the model at the one moment that is right for a plan. Raises `LayoutError`.
    """
    shard_tensors(model, mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    planned = apply_plan(model)
    return shard_data(model, mesh, reshard_after_forward=reshard_after_forward), planned


def shard_tensors(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> None:
    """Spread the tensors and experts of a model over ranks with the same data or experts.

    Of a model that is cut into pipeline stages, each stage is given by itself, once it is cut: with `sequence_parallel`
    a stage takes and returns whole sequences, which it cuts and joins at its own first and last layer.

    Comes before any plan and before `shard_data`: raises `LayoutError` where it does not, or where sizes do not fit.
    """
    _refuse_wrong_order(model)
    tensors, experts = mesh.sub("tp"), mesh.sub("ep")
    if tensors is not None:
        parallelize_tensors(model, tensors, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    if experts is not None:
        mixtures: list[Any] = [layer.mlp for layer in find_regions(model).values() if has_experts(layer)]
        if not mixtures:
            raise LayoutError(
                f"ep_size {experts.size()} on {type(model).__name__}, which has no experts; set ep_size: 1"
            )
        for each in mixtures:
            parallelize_module(each, experts, {"experts": ExchangedExperts()})


def _refuse_wrong_order(model: nn.Module) -> None:
    if any(isinstance(each, FSDPModule) for each in model.modules()):
        state = "is sharded over data parallel ranks"
    elif any(isinstance(each, DTensor) for each in model.parameters()):
        state = "is spread over ranks"
    elif any(is_planned(each) for each in model.modules()):
        state = "is under a plan"
    else:
        return
    raise LayoutError(
        f"{type(model).__name__} {state} already; the order is shard_tensors, then actmem.apply, then shard_data"
    )
