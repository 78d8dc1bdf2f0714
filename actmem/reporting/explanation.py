"""Why each op of a layer is saved, recomputed or neither."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from actmem.graph import Graph, Op, RegionGraph, Value
from actmem.planning import Fates
from actmem.planning.fates import SAVED, SMALL, fates_under
from actmem.planning.plan import INPUT_PATH, RuleSet
from actmem.planning.prices import Price, Pricer
from actmem.runtime.engine import RuleSource
from actmem.units import format_bytes

_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_NOTICED_SECONDS = 1e-5
_FACE = "face"  # as `actmem.runtime.learning` names the op between two faces of a value


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op, or an input that the layer holds.

    `output` is shape and dtype of its (first) output. `held_bytes` stay until the backward pass, `dropped_bytes` would
    without the plan, and `swapped_bytes` wait elsewhere. `action` is ``save``, ``recompute``, ``swap`` or empty for an
    op that the backward pass never asks for. `price` is there where a device is named.
    """

    path: str
    output: str
    held_bytes: int
    dropped_bytes: int
    swapped_bytes: int
    flops: int
    moved_bytes: int
    action: str
    reason: str
    price: Price | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte read or written; ``None`` where there are none to count."""
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None


@dataclass(frozen=True)
class Explanation:
    """The rows of one layer; `layers` are the indices of all that run the same ops under the same rules. `idle` are
    the rules for these layers that match no op in them, by their settings or patterns."""

    kind: str
    layers: tuple[int, ...]
    plan: str
    rows: tuple[OpRow, ...]
    idle: tuple[str, ...] = ()

    @property
    def total(self) -> OpRow:
        """The sums over all rows."""
        return OpRow(
            path="total",
            output="",
            held_bytes=sum(row.held_bytes for row in self.rows),
            dropped_bytes=sum(row.dropped_bytes for row in self.rows),
            swapped_bytes=sum(row.swapped_bytes for row in self.rows),
            flops=sum(row.flops for row in self.rows),
            moved_bytes=sum(row.moved_bytes for row in self.rows),
            action="",
            reason="",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(row) | {"intensity": row.intensity} | _rates(row.price) for row in self.rows]
        head = {"kind": self.kind, "layers": self.layers, "plan": self.plan}
        return head | {"rows": rows, "total": asdict(self.total), "idle": self.idle}


def explain_layers(
    graph: Graph,
    source: RuleSource,
    layers: Iterable[int],
    *,
    min_swap_bytes: int = 0,
    pricer: Pricer | None = None,
) -> list[Explanation]:
    """One explanation for all of these `layers` (indices from 0) that run the same ops under the same rules. With a
    `pricer` for the same rules each op has its price, and the reasons are figures."""
    kinds = list(graph.layers.values())
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for layer in layers:
        groups.setdefault((kinds[layer], source.group(layer)), []).append(layer)
    return [
        _explain_group(graph.kinds[kind], kind, tuple(group), source, min_swap_bytes, pricer)
        for (kind, _), group in groups.items()
    ]


def _explain_group(
    graph: RegionGraph,
    kind: str,
    layers: tuple[int, ...],
    source: RuleSource,
    min_swap_bytes: int,
    pricer: Pricer | None,
) -> Explanation:
    rules = RuleSet(source.rules(layers[0], graph))
    rules.meet([INPUT_PATH, *(op.path for op in graph.ops)])
    idle = tuple(rule.label or rule.pattern for rule in rules.rules if rule not in rules.matched)
    fates = fates_under(graph, rules, min_swap_bytes=min_swap_bytes)
    rows = explain(fates)
    if pricer is not None:
        inputs = len(rows) - len(graph.ops)
        prices = [pricer.price(layers[0], op) for op in range(len(graph.ops))]
        rows = (*rows[:inputs], *with_prices(rows[inputs:], prices))
    return Explanation(kind, layers, source.name, tuple(_without_faces(graph, rows)), idle)


def _without_faces(graph: RegionGraph, rows: Sequence[OpRow]) -> Iterator[OpRow]:
    """Rows but those of ops that wrap a tensor of another row, or unwrap it, as `DTensor` does: they have that row's
    path, and no bytes."""
    inputs = len(rows) - len(graph.ops)
    yield from rows[:inputs]
    yield from (row for row, op in zip(rows[inputs:], graph.ops, strict=True) if op.name != _FACE)


def explain(fates: Fates) -> tuple[OpRow, ...]:
    """A row for each input that is held, then for each op, in order. A storage counts at the op that created it, so
    that the bytes add up."""
    return (*_input_rows(fates), *(_op_row(fates, index) for index in range(len(fates.graph.ops))))


def with_prices(rows: Sequence[OpRow], prices: Sequence[Price]) -> list[OpRow]:
    """Rows of ops with their prices, and reasons that quote them. What the plan pays for memory is what it drops in
    the layer by the seconds that it runs again."""
    seconds = sum(price.seconds for row, price in zip(rows, prices, strict=True) if row.action == "recompute")
    paid = sum(row.dropped_bytes for row in rows) / seconds if seconds else None
    return [
        replace(row, price=price, reason=_priced_reason(row, price, paid))
        for row, price in zip(rows, prices, strict=True)
    ]


def _priced_reason(row: OpRow, price: Price, paid: float | None) -> str:
    if price.copy_bytes_per_second is not None:
        way = row.swapped_bytes / price.copy_bytes_per_second
        return f"swapped: {_ms(way)} each way"
    if price.rate is None or not (row.dropped_bytes or row.held_bytes):
        return row.reason
    cost = f"{price.num_again} {'op' if price.num_again == 1 else 'ops'}, {_ms(price.again_seconds)}"
    if row.action == "recompute":
        return f"frees {format_bytes(price.freed_bytes)}: {cost}"
    told = f"saved: making it again takes {cost} for {format_bytes(price.freed_bytes)}"
    if paid is not None and price.rate < paid:
        told += f", worse than what the plan pays ({_ms(price.freed_bytes / paid)})"
    if price.swap_adds_seconds is not None and price.swap_adds_seconds >= _NOTICED_SECONDS:
        told += f"; link busy: a swap would be exposed {_ms(price.swap_adds_seconds)}"
    return told


def _rates(price: Price | None) -> dict[str, float | None]:
    return {} if price is None else {"rate": price.rate, "peak_rate": price.peak_rate}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"


def _input_rows(fates: Fates) -> Iterator[OpRow]:
    graph = fates.graph
    for index, storage in enumerate(graph.storages):
        if storage.kind != "input" or not (index in fates.held or index in fates.swapped):
            continue
        output = _described(next(value for value in graph.values if value.storage == index))
        if index in fates.swapped:
            yield OpRow(INPUT_PATH, output, 0, 0, storage.num_bytes, 0, 0, "swap", "input of the layer, swapped")
        else:
            yield OpRow(INPUT_PATH, output, storage.num_bytes, 0, 0, 0, 0, "save", "input of the layer")


def _op_row(fates: Fates, index: int) -> OpRow:
    graph, op = fates.graph, fates.graph.ops[index]
    made = _storages_made_by(graph, index)
    held, swapped = made & fates.held.keys(), made & fates.swapped
    reasons = {fates.held[storage] for storage in held}
    return OpRow(
        path=op.path,
        output=_described(graph.values[op.outputs[0]]) if op.outputs else "",
        held_bytes=graph.num_bytes(held),
        dropped_bytes=graph.num_bytes(made & fates.dropped),
        swapped_bytes=graph.num_bytes(swapped),
        flops=op.flops,
        moved_bytes=op.moved_bytes,
        action="recompute" if index in fates.replayed else "swap" if swapped else "save" if held else "",
        reason=_reason(op, index in fates.replayed, bool(swapped), reasons),
    )


def _storages_made_by(graph: RegionGraph, index: int) -> set[int]:
    outputs = {graph.values[output].storage for output in graph.ops[index].outputs}
    return {storage for storage in outputs if graph.creators.get(storage) == index}


def _reason(op: Op, replayed: bool, swapped: bool, held: set[str]) -> str:
    """An op of several outputs may be replayed for one and have another held; then it has both reasons."""
    by_choice = {SAVED: "saved by plan", SMALL: f"saved: {SMALL}"}
    kept = [by_choice.get(reason, f"always saved: {reason}") for reason in sorted(held)]
    if swapped:
        kept.append("swapped by plan")
    if op.view:
        kept.append("view")
    elif replayed:
        kept.append("recomputed")
    return ", ".join(kept) or "not needed"


def _described(value: Value) -> str:
    shape = "x".join(map(str, value.shape)) or "scalar"
    return f"{shape} {_SHORT_DTYPES.get(value.dtype, value.dtype)}"
