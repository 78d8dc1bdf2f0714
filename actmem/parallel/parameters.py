"""Modules whose own forward sees its parameters, arguments and result otherwise than the rest of the model does.

Hugging Face's forwards read their parameters by name. While one runs, the name leads to what a function makes of the
parameter: its part on this rank, or itself with gradients that are summed over ranks. The parameter stays where it is,
under its name, for the optimizer, checkpoints and FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

View = Callable[[nn.Parameter], Tensor]
State = TypeVar("State")


def see_parameters(module: nn.Module, view: View) -> None:
    """Let calls of `module` see its own parameters, not those of submodules, through `view` from now on."""
    module.register_forward_pre_hook(partial(_show, view))
    module.register_forward_hook(_hide, always_call=True)


def _show(view: View, module: nn.Module, args: Any) -> None:
    # In the instance's dictionary a name goes before the parameter of that name.
    vars(module).update({name: view(each) for name, each in module.named_parameters(recurse=False)})


def _hide(module: nn.Module, args: Any, out: Any) -> None:
    for name, _ in module.named_parameters(recurse=False):
        vars(module).pop(name, None)


def surround(
    module: nn.Module,
    before: Callable[..., tuple[tuple[Any, ...], State]],
    after: Callable[[Tensor, State], Tensor],
) -> None:
    """Run `before` on a call's positional arguments, which gives those that `module` gets and something to keep until
    `after` turns the result of `module` into that of the call."""
    kept: list[State] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args, state = before(*args)
        kept.append(state)
        return args

    def leave(module: nn.Module, args: tuple[Any, ...], out: Tensor | None) -> Tensor | None:
        state = kept.pop() if kept else None
        return None if state is None or out is None else after(out, state)  # it is None where the call failed

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def shard_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its part of the rows of `module`'s own parameters, whole until now on all ranks; its forward sees
    that part alone."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    see_parameters(module, local_part)


def local_part(tensor: Tensor) -> Tensor:
    """A rank's own part of a sharded tensor, whose gradient is that part's."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def summing_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor that is the same on all ranks of `mesh`, each of which gives only its share of the gradient: the same
    tensor, with the gradients summed over the ranks."""
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return everywhere.to_local(grad_placements=[Partial()])


def summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks of `mesh` of what each has; the gradient of the sum, the same on all, goes to each."""
    shares = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    placements: list[Placement] = [Replicate()]
    return shares.redistribute(placements=placements).to_local()
