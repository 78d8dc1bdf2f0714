"""From what a recorder saw to the `Step` around the layers' graphs, and the backward passes in them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from actmem.graph import Call, Constant, Escape, Gap, Graph, Op, RegionGraph, Standing, Step, StepOp, Storage, Value
from actmem.tracing.recorder import OWNED, Place, Seen, StepRecorder
from actmem.tracing.structure import class_of, numbered

_Moment = tuple[Place, int]


def assemble(
    graph: Graph, recorder: StepRecorder, standing: Standing, num_tokens: int, scratch: Mapping[str, int]
) -> Graph:
    """`graph`, of forward passes alone, with the rest of the step that `recorder` saw; `scratch` has by signature what
    kernels take for themselves."""
    layers = [graph.of_layer(name) for name in graph.layers]
    return _Assembly(graph, layers, recorder, scratch).graph(standing, num_tokens)


class _Assembly:
    def __init__(
        self, graph: Graph, layers: Sequence[RegionGraph], recorder: StepRecorder, scratch: Mapping[str, int]
    ) -> None:
        self._graph = graph
        self._scratch = scratch
        self._layers = layers
        self._recorder = recorder
        self._numbers = [dict(_numbers(layer, self._ops(index, True, False))) for index, layer in enumerate(layers)]
        self._constants = [dict(self._find_constants(index)) for index in range(len(layers))]
        self._takers = self._find_takers()
        self._savers = self._find_savers()
        self._allocated: Counter[tuple[object, int]] = Counter()
        self._gradients: Counter[tuple[object, int]] = Counter()
        self._accumulated: Counter[tuple[object, int]] = Counter()
        self._freed: Counter[tuple[object, int]] = Counter()
        self._escapes: dict[int, list[Escape]] = defaultdict(list)
        self._outside: list[Constant] = []
        self._follow_memories()

    def graph(self, standing: Standing, num_tokens: int) -> Graph:
        layers, kinds = self._with_backward()
        planned = [kinds[kind] for kind in layers.values()]
        step = Step(
            calls=tuple(
                Call(self._shared(layer), tuple(self._escapes[layer]), tuple(sorted(self._constants[layer].items())))
                for layer in range(len(self._layers))
            ),
            gaps=tuple(
                Gap(self._step_ops(layer, False, False), self._backward_gap(layer, planned))
                for layer in range(len(self._layers) + 1)
            ),
            standing=standing,
            num_tokens=num_tokens,
            constants=tuple(self._outside),
        )
        return replace(self._graph, layers=layers, kinds=kinds, step=step)

    def _with_backward(self) -> tuple[dict[str, str], dict[str, RegionGraph]]:
        """Layers and kinds as in `Graph`, with backward passes. A kind has that of most of its layers; those whose pass
        does the same for longer, or needs memory at other moments, become kinds of their own."""
        layers, kinds = dict(self._graph.layers), dict(self._graph.kinds)
        members: dict[str, list[int]] = defaultdict(list)
        for index, kind in enumerate(layers.values()):
            members[kind].append(index)
        names = list(layers)
        for kind, indices in members.items():
            ops = self._with_scratch(kinds[kind])
            storages = self._with_names(indices[0])
            for number, (backward, alike) in enumerate(self._split(indices)):
                name = numbered(class_of(kind), map(class_of, kinds)) if number else kind
                kinds[name] = replace(self._graph.kinds[kind], ops=ops, storages=storages, backward=backward)
                layers.update((names[index], name) for index in alike)
        return layers, kinds

    def _with_scratch(self, graph: RegionGraph) -> tuple[Op, ...]:
        seen = [self._scratch.get(graph.signature(index)) for index in range(len(graph.ops))]
        return tuple(replace(op, scratch_bytes=each) for op, each in zip(graph.ops, seen, strict=True))

    def _with_names(self, layer: int) -> tuple[Storage, ...]:
        """A layer's storages, with how long its code has names for those that nothing else keeps."""
        graph, memories = self._layers[layer], self._recorder.memories
        read = {graph.values[value].storage: index for index, op in enumerate(graph.ops) for value in op.inputs}
        matched = list(_matched(graph, self._ops(layer, True, False)))
        storages = list(graph.storages)
        for number, storage in {number: each for each, number in self._numbers[layer].items()}.items():
            gone = memories[number].gone
            if storage not in graph.creators or gone is None or gone[0].backward:
                continue
            before = gone[1] if gone[0].key == (layer, True, False) else math.inf
            until = max(index for index, position in matched if position < before)
            if until > read.get(storage, graph.creators[storage]):
                storages[storage] = replace(storages[storage], named_until=until)
        return tuple(storages)

    def _split(self, indices: Sequence[int]) -> list[tuple[tuple[StepOp, ...], list[int]]]:
        """Backward passes of layers of one kind, that of most first, and the layers that each stands for."""
        passes = {index: self._step_ops(index, True, True) for index in indices}
        found: list[tuple[tuple[StepOp, ...], list[int]]] = []
        for backward, _ in Counter(passes.values()).most_common():
            mine = [index for index in indices if passes[index] == backward]
            same = (each for each in found if self._is_interchangeable(mine[0], backward, *each))
            known = next(same, None)
            if known is None:
                found.append((backward, mine))
            else:
                known[1].extend(mine)
        return found

    def _is_interchangeable(
        self, layer: int, mine: tuple[StepOp, ...], theirs: tuple[StepOp, ...], others: Sequence[int]
    ) -> bool:
        """Whether a layer's backward pass can be planned as that of others. Where their forward passes ran on other
        shapes, as those of experts do, the numbers of this batch alone tell them apart."""
        runs = [[op.signature for op in self._ops(index, True, False)] for index in (layer, others[0])]
        return runs[0] != runs[1] or _is_alike(mine, theirs)

    def _backward_gap(self, layer: int, kinds: Sequence[RegionGraph]) -> tuple[StepOp, ...]:
        """What runs after a layer's backward pass; its first moment takes up in what the pass differed from its kind's:
        what it hands over, such as a gradient that later layers only add to."""
        first, *others = self._step_ops(layer, False, True)
        if layer < len(self._layers):
            more = _left_by(self._step_ops(layer, True, True)) - _left_by(kinds[layer].backward)
            first = replace(first, allocated_bytes=max(more, 0), freed_bytes=first.freed_bytes + max(-more, 0))
        return first, *others

    def _ops(self, layer: int, in_layer: bool, backward: bool) -> list[Seen]:
        place = self._recorder.places.get((layer, in_layer, backward))
        return [] if place is None else place.ops

    def _step_ops(self, layer: int, in_layer: bool, backward: bool) -> tuple[StepOp, ...]:
        """In a gap, one moment stands before the first op, for what goes before it."""
        key = (layer, in_layer, backward)
        first = self._freed[key, -1]
        ops = [StepOp("", "", 0, 0, False, 0, first)] if first or not in_layer else []
        for index, seen in enumerate(self._ops(*key)):
            ops.append(
                StepOp(
                    name=seen.name,
                    signature=seen.signature,
                    flops=seen.flops,
                    moved_bytes=seen.moved_bytes,
                    compute_intensive=seen.compute_intensive,
                    allocated_bytes=self._allocated[key, index],
                    freed_bytes=self._freed[key, index],
                    gradient_bytes=self._gradients[key, index],
                    accumulated_bytes=self._accumulated[key, index],
                    upstream_bytes=self._upstream_of(seen) if self._gradients[key, index] else 0,
                    unpacks=tuple(seen.unpacks),
                    releases=tuple(seen.releases),
                    group_size=seen.group_size,
                    scratch_bytes=self._scratch.get(seen.signature),
                )
            )
        return tuple(op for op in ops if not in_layer or _does_something(op))

    def _find_constants(self, layer: int) -> Iterator[tuple[int, int]]:
        for storage, number in self._numbers[layer].items():
            if self._layers[layer].storages[storage].constant:
                yield storage, number

    def _find_takers(self) -> dict[int, int]:
        """The last layer to which each memory is an input that may be moved away."""
        takers: dict[int, int] = {}
        for layer, graph in enumerate(self._layers):
            for storage, number in self._numbers[layer].items():
                if graph.storages[storage].kind == "input" and not graph.storages[storage].constant:
                    takers[number] = layer
        return takers

    def _find_savers(self) -> set[int]:
        """Memories that are an input to a layer whose autograd saves it."""
        return {
            number
            for graph, numbers in zip(self._layers, self._numbers, strict=True)
            for storage, number in numbers.items()
            if storage in graph.packed_storages and not graph.storages[storage].constant
        }

    def _upstream_of(self, op: Seen) -> int:
        """Bytes of gradients that an op reads."""
        made = (self._recorder.memories[number] for number in set(op.inputs) - {OWNED})
        return sum(memory.num_bytes for memory in made if memory.made[0].backward)

    def _shared(self, layer: int) -> tuple[tuple[int, int], ...]:
        """A layer's own outputs that another layer takes, and inputs that others made or take as well."""
        elsewhere = {
            number for other, numbers in enumerate(self._numbers) if other != layer for number in numbers.values()
        }
        return tuple(
            (storage, number)
            for storage, number in sorted(self._numbers[layer].items())
            if number in elsewhere and not self._layers[layer].storages[storage].constant
        )

    def _follow_memories(self) -> None:
        constants = {number for numbers in self._constants for number in numbers.values()}
        added_in_place = dict(self._sums_of_gradients())
        for number, memory in enumerate(self._recorder.memories):
            place, index = memory.made
            if not memory.num_bytes:
                continue
            if place.in_layer and not place.backward:
                self._follow_own(number, number in constants)
                continue
            if memory.accumulated is not None:
                joined, before = memory.accumulated
                share, end = -(-memory.num_bytes // memory.num_ranks), (joined.key, before - 1)
                end = end if before else (place.key, index)
                self._gradients[place.key, index] += share
                self._accumulated[end] += share
                self._freed[end] += memory.num_bytes - share
            if number not in added_in_place:
                self._allocated[place.key, index] += memory.num_bytes
            if number in constants and not place.backward:
                self._outside.append(Constant(number, memory.num_bytes, *self._end_of_constant(number)))
            elif memory.gone is not None and number not in added_in_place.values():
                self._freed[self._end_outside(number)] += memory.num_bytes

    def _sums_of_gradients(self) -> Iterator[tuple[int, int]]:
        """Pairs of a sum of two gradients, and the one that came first where autograd adds the other to it, as it does
        where nobody else refers to it, and it is no view, which would refer to what it views. Under a dispatch mode, as
        here, it makes a new tensor instead."""
        memories = self._recorder.memories
        for number, memory in enumerate(memories):
            place, index = memory.made
            if not place.backward or place.ops[index].name != "add" or place.ops[index].of_view:
                continue
            first = place.ops[index].inputs[0]
            goes = first != OWNED and memories[first].gone == (place, index + 1)
            if goes and memories[first].num_bytes == memory.num_bytes:
                yield number, first

    def _end_outside(self, number: int) -> tuple[tuple[int, bool, bool], int]:
        """After which op what a layer's forward did not make is to be counted as gone. An input that a layer saves is
        that layer's; what a layer's saved tensors held on to goes with the gap that follows its backward pass."""
        memory = self._recorder.memories[number]
        made, (gone, index) = memory.made[0], memory.gone or memory.made
        if number in self._savers and not made.backward:
            return made.key, len(made.ops) - 1
        if made.backward or not gone.in_layer:
            return gone.key, index - 1
        return (gone.layer if gone.backward else gone.layer + 1, False, gone.backward), -1

    def _end_of_constant(self, number: int) -> tuple[int, bool, int]:
        """The gap, the direction and the `StepOp` before which it goes; the first of those is a moment of its own."""
        if self._recorder.memories[number].gone is None:
            return 0, True, self._last(0) + 1
        (gap, _, backward), index = self._end_outside(number)
        return gap, backward, index + 2

    def _is_handed_over(self, number: int, gap: int, backward: bool, op: int) -> bool:
        """Whether memory is gone as soon as the last layer that takes it is."""
        return not backward and number in self._takers and (gap, op) <= (self._takers[number] + 1, 0)

    def _follow_own(self, number: int, is_constant: bool) -> None:
        """Note how a memory that a layer made outlives the layer's call, if it does for reasons of its own. A constant
        of another layer does even where that layer's autograd alone holds it: it counts outside the layers."""
        memory = self._recorder.memories[number]
        made = memory.made[0]
        end = (0, True, self._last(0)) if memory.gone is None else _gap_of(memory.gone)
        gap, backward, op = end
        soon = not backward and (gap, op) <= (made.layer + 1, 0)
        held = memory.gone is not None and memory.gone[0].in_layer and backward  # by what autograd saved in a layer
        if held and memory.let_go is not None and memory.let_go[0].backward:
            end, held = _gap_of(memory.let_go), False
            gap, backward, op = end
        if soon or (held and not is_constant) or self._is_handed_over(number, *end):
            return
        storages = [storage for storage, other in self._numbers[made.layer].items() if other == number]
        if storages:
            self._escapes[made.layer].append(Escape(storages[0], gap, backward, op + 1))

    def _last(self, gap: int) -> int:
        return len(self._ops(gap, False, True))


def with_standing_input(graph: Graph) -> Graph:
    """The same where what the first layer is given stands whatever the layers do, so that it is none of theirs."""
    (name, kind), *others = graph.layers.items()
    layer = graph.kinds[kind]
    given = next((value.storage for value in layer.values if value.producer is None and _is_state(layer, value)), None)
    if given is None:
        return graph
    storages = tuple(
        replace(each, constant=True) if index == given else each for index, each in enumerate(layer.storages)
    )
    own = numbered(class_of(kind), map(class_of, graph.kinds))
    kinds = {each: graph.kinds[each] for each in dict.fromkeys(kind for _, kind in others)}
    return replace(graph, layers={name: own, **dict(others)}, kinds={own: replace(layer, storages=storages), **kinds})


def _is_state(layer: RegionGraph, value: Value) -> bool:
    storage = layer.storages[value.storage]
    return storage.kind == "input" and not storage.constant


def _left_by(ops: Sequence[StepOp]) -> int:
    return sum(op.allocated_bytes - op.freed_bytes for op in ops)


def _is_alike(one: tuple[StepOp, ...], other: tuple[StepOp, ...]) -> bool:
    """Whether two backward passes do the same and need the same memory all along, until they hand over what they leave:
    the last op of one may free more than the other's, and be followed by others, if those are no peak."""
    shorter, longer = sorted((one, other), key=len)
    if not shorter:
        return not longer
    last, common = len(shorter) - 1, longer[: len(shorter)]
    if shorter[:last] != common[:last] or replace(shorter[last], freed_bytes=0) != replace(common[last], freed_bytes=0):
        return False
    return _peak_of(common) == _peak_of(longer)


def _peak_of(ops: Sequence[StepOp]) -> int:
    changes = (change for op in ops for change in (op.allocated_bytes, -op.freed_bytes))
    return max(accumulate(changes))


def _does_something(op: StepOp) -> bool:
    memory = op.allocated_bytes or op.freed_bytes or op.accumulated_bytes
    return bool(op.flops or op.moved_bytes or memory or op.unpacks or op.releases)


def _gap_of(moment: _Moment) -> tuple[int, bool, int]:
    """The gap, the direction and the op in it before which a moment lies; one in a layer counts to the gap behind."""
    place, index = moment
    if not place.in_layer:
        return place.layer, place.backward, index
    return (place.layer if place.backward else place.layer + 1), place.backward, 0


def _numbers(graph: RegionGraph, seen: Sequence[Seen]) -> Iterator[tuple[int, int]]:
    """Pairs of a storage of `graph` and the number that the recorder has for it."""
    for index, position in _matched(graph, seen):
        op, same = graph.ops[index], seen[position]
        for value, number in (
            *zip(op.inputs, same.inputs, strict=False),
            *zip(op.outputs, same.outputs, strict=False),
        ):
            storage = graph.values[value].storage
            if number != OWNED and graph.storages[storage].kind != "parameter":
                yield storage, number


def _matched(graph: RegionGraph, seen: Sequence[Seen]) -> Iterator[tuple[int, int]]:
    """Indices of an op of `graph`, and of the same one in `seen`.

    Both lists of ops are of the same forward pass. The graph has more detaches, and a replayable Function as one op.
    """
    position = 0
    for index, op in enumerate(graph.ops):
        ahead = next((i for i in range(position, len(seen)) if seen[i].name == op.name), None)
        if ahead is not None and op.name != "detach":
            position = ahead + 1
            yield index, ahead
