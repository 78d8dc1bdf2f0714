"""The norm of all gradients of a model that is spread over ranks: each element counts once, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from actmem.parallel.mesh import Mesh

Groups = tuple[distributed.ProcessGroup, ...]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None, mesh: Mesh) -> float:
    """The norm of all gradients of all ranks together; where it exceeds `limit`, they are scaled down to it, in place.

    `parameters` are all those of this rank, of every stage it has. All ranks must call it, and all get the same norm.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, mesh)
    if limit is not None and norm > limit:
        factor = limit / (norm + 1e-6)
        for parameter in parameters:
            if parameter.grad is not None:
                _local(parameter.grad).mul_(factor)
    return norm


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> float:
    """The norm of all gradients of all ranks together; all ranks must ask for it."""
    # Ranks of a stage have the same parameters in the same order, so they sum over the same groups in the same order.
    spread: dict[Groups, list[Tensor]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        gradients = spread.setdefault(_groups_of(parameter), [])
        if parameter.grad is not None:
            gradients.append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, gradients in spread.items():
        total += _summed(_squares(gradients, device), groups)
    stages = mesh.group("pp")
    return float(_summed(total, () if stages is None else (stages,)).sqrt())


def _groups_of(parameter: nn.Parameter) -> Groups:
    """The groups of ranks that hold different elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cut = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1)


def _squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    return nn.utils.get_total_norm([each.float() for each in gradients]).square()


def _summed(share: Tensor, groups: Groups) -> Tensor:
    for group in groups:
        distributed.all_reduce(share, group=group)
    return share


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
