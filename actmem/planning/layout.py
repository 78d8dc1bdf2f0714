"""How the training state is laid out: what the optimizer keeps, what is trained, over how many devices it is shared.

All of it is arithmetic on a traced step. The activations stay as they were traced, for each device has its own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from actmem.errors import PlanError
from actmem.graph import Graph, RegionGraph, Standing, StepOp

OptimizerName = Literal["adamw", "sgd", "none"]
Trained = Literal["full", "lora"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
TRAINED: tuple[Trained, ...] = get_args(Trained)

_COPIES: dict[OptimizerName, int] = {"adamw": 2, "sgd": 1, "none": 0}
_GATHERED_LAYERS = 2
_DTYPE_BYTES = {"float64": 8, "float32": 4}


@dataclass(frozen=True)
class Layout:
    """`optimizer` keeps two copies of what is trained (`adamw`), one (`sgd` with momentum) or none.

    `lora` freezes all parameters: they have neither gradients nor optimizer state, and the products that would make
    their gradients do not run; beside each matrix of a layer that takes part in a product stand two trained ones of
    rank `lora_rank`. The input of each product is still saved, for the adapter's gradient. `num_shards` devices share
    parameters, gradients and optimizer state (FSDP); two layers' parameters are gathered at a time, and a gradient is
    whole only while its op runs.
    """

    optimizer: OptimizerName = "adamw"
    trained: Trained = "full"
    lora_rank: int = 16
    num_shards: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("optimizer", OPTIMIZERS), ("trained", TRAINED)):
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name} {getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}")
        for name in ("lora_rank", "num_shards"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; allowed: 1 or more")

    @property
    def words(self) -> str:
        """For a person to read."""
        parts = [f"optimizer {self.optimizer}"]
        if self.trained == "lora":
            parts.append(f"LoRA of rank {self.lora_rank}")
        if self.num_shards > 1:
            parts.append(f"FSDP over {self.num_shards}")
        return ", ".join(parts)


def lay_out(graph: Graph, layout: Layout) -> Graph:
    """The step of `graph` under a layout."""
    assert graph.step is not None, "only the layers' forward passes were traced"
    changed = graph
    if layout.trained == "lora":
        changed = _each_backward_op(changed, _without_gradient)
    if layout.num_shards > 1:
        changed = _each_backward_op(changed, lambda op: _with_shared_gradient(op, layout.num_shards))
    assert changed.step is not None
    return replace(changed, step=replace(changed.step, standing=standing_under(graph, layout)))


def standing_under(graph: Graph, layout: Layout) -> Standing:
    """What stands on one device through a step."""
    assert graph.step is not None
    traced, shards = graph.step.standing, layout.num_shards
    adapters = adapter_bytes(graph, layout.lora_rank) if layout.trained == "lora" else 0
    trained = adapters or traced.gradients
    gathered = _GATHERED_LAYERS * max(map(_parameter_bytes, graph.kinds.values()), default=0) if shards > 1 else 0
    return Standing(
        parameters=_share(traced.parameters + adapters, shards) + gathered,
        buffers=traced.buffers,
        gradients=_share(trained, shards),
        optimizer=_share(_COPIES[layout.optimizer] * trained, shards),
    )


def adapter_bytes(graph: Graph, rank: int) -> int:
    """Bytes of the adapters of all layers: for each matrix of n x m, rank x (n + m) numbers of its dtype."""
    return sum(rank * size for name in graph.layers for size in _adapter_sizes(graph.of_layer(name)))


def _adapter_sizes(layer: RegionGraph) -> Iterator[int]:
    seen: set[int] = set()
    for op in layer.ops:
        for index in op.inputs if op.compute_intensive else ():
            value = layer.values[index]
            if (
                layer.storages[value.storage].kind == "parameter"
                and len(value.shape) == 2
                and value.storage not in seen
            ):
                seen.add(value.storage)
                yield sum(value.shape) * _DTYPE_BYTES.get(value.dtype, 2)


def _parameter_bytes(layer: RegionGraph) -> int:
    return sum(each.num_bytes for each in layer.storages if each.kind == "parameter")


def _each_backward_op(graph: Graph, change: Callable[[StepOp], StepOp]) -> Graph:
    """The same step with another op in place of each that makes a parameter's gradient, or after which one is added."""

    def changed(ops: tuple[StepOp, ...]) -> tuple[StepOp, ...]:
        return tuple(change(op) if op.gradient_bytes or op.accumulated_bytes else op for op in ops)

    assert graph.step is not None
    kinds = {kind: replace(layer, backward=changed(layer.backward)) for kind, layer in graph.kinds.items()}
    gaps = tuple(replace(gap, backward=changed(gap.backward)) for gap in graph.step.gaps)
    return replace(graph, kinds=kinds, step=replace(graph.step, gaps=gaps))


def _without_gradient(op: StepOp) -> StepOp:
    """An op that makes nothing but a gradient does not run; one that makes more makes only that."""
    left = replace(op, allocated_bytes=op.allocated_bytes - op.gradient_bytes, gradient_bytes=0, accumulated_bytes=0)
    if left.allocated_bytes or not op.gradient_bytes:
        return left
    return replace(left, name="", signature="", flops=0, moved_bytes=0, group_size=0)


def _with_shared_gradient(op: StepOp, num_shards: int) -> StepOp:
    """The gradient comes whole; when it is complete, all but this device's share goes."""
    share = _share(op.accumulated_bytes, num_shards)
    return replace(
        op,
        gradient_bytes=_share(op.gradient_bytes, num_shards),
        accumulated_bytes=share,
        freed_bytes=op.freed_bytes + op.accumulated_bytes - share,
    )


def _share(num_bytes: int, num_shards: int) -> int:
    return -(-num_bytes // num_shards)
