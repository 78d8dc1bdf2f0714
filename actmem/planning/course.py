"""How one layer runs under given fates: op by op, with the time it takes and the bytes that stand meanwhile.

The engine's rules, played through on the graph. In the forward pass an op's outputs stand until the last op has read
them and the layer's code has no name for them any more, and what is held until the end. In the backward pass autograd
picks up what it saved; what is not there is made again just then, with all that leads to it; a remade value goes when
all who read it have, a held one when autograd has let go of everything that hangs on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from actmem.graph import RegionGraph, StepOp
from actmem.planning.fates import Fates

OpSeconds = Callable[[RegionGraph, int], float]
"""Seconds that the `int`-th op of a layer takes."""

StepOpSeconds = Callable[[StepOp], float]


def _no_scratch(*_: object) -> int:
    return 0


@dataclass(frozen=True)
class Costs:
    """What a course needs to know of the device: seconds of ops; what the engine adds for each op that is run again;
    bytes of a parameter's gradient added to one that stands, per second; the bytes that memory is given out in; and
    the bytes that ops take for themselves while they run (`op_scratch`, `step_op_scratch`)."""

    op_seconds: OpSeconds
    step_op_seconds: StepOpSeconds
    replay_seconds: float = 0.0
    watch_seconds: float = 0.0
    accumulate_bytes_per_second: float = float("inf")
    granularity: int = 1
    op_scratch: Callable[[RegionGraph, int], int] = _no_scratch
    step_op_scratch: Callable[[StepOp], int] = _no_scratch

    def rounded(self, num_bytes: int) -> int:
        """The bytes that an allocation of `num_bytes` takes."""
        return -(-num_bytes // self.granularity) * self.granularity


@dataclass(frozen=True, slots=True)
class Slice:
    """One op of a course: its name, whether it is run again, its seconds, and the layer's own bytes that stand while it
    runs. `for_weights`: it makes a parameter's gradient."""

    name: str
    again: bool
    seconds: float
    standing_bytes: int
    for_weights: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """A storage that is moved away: produced by slice `produced` of the forward pass, first needed at slice `needed`
    and let go after slice `let_go` of the backward pass."""

    storage: int
    num_bytes: int
    produced: int
    needed: int
    let_go: int


@dataclass(frozen=True)
class Course:
    """One call of a layer. `held_bytes` stand between its passes. The bytes of backward slices count what the layer
    holds, makes again and allocates, above what stood when its backward pass began without it; swapped storages are
    left out. `left_bytes` is what stands of that when it is over: gradients, less those that it was handed."""

    fates: Fates
    forward: tuple[Slice, ...]
    backward: tuple[Slice, ...]
    held_bytes: int
    left_bytes: int
    swaps: tuple[Swap, ...]

    @cached_property
    def forward_seconds(self) -> float:
        """Of all ops together."""
        return sum(each.seconds for each in self.forward)

    @cached_property
    def backward_seconds(self) -> float:
        """Of all ops together, those that are run again included."""
        return sum(each.seconds for each in self.backward)

    @cached_property
    def upstream_bytes(self) -> int:
        """Gradients that have to stay where those of the weights are made later."""
        return sum(op.upstream_bytes for op in self.fates.graph.backward)

    @cached_property
    def replay_seconds(self) -> float:
        """Of the ops that are run again."""
        return sum(each.seconds for each in self.backward if each.again)

    @cached_property
    def forward_peak_bytes(self) -> int:
        """The most of the layer's own that stands in its forward pass."""
        return max((each.standing_bytes for each in self.forward), default=0)

    @cached_property
    def backward_peak_bytes(self) -> int:
        """The most that stands in the backward pass, with all that was swapped here from its beginning on."""
        away = [
            sum(swap.num_bytes for swap in self.swaps if index <= swap.let_go) for index in range(len(self.backward))
        ]
        return max((each.standing_bytes + more for each, more in zip(self.backward, away, strict=True)), default=0)

    @property
    def swapped_bytes(self) -> int:
        """Bytes that are moved away."""
        return sum(swap.num_bytes for swap in self.swaps)


def follow(
    fates: Fates,
    costs: Costs,
    *,
    leaving: frozenset[int] = frozenset(),
    elsewhere: frozenset[int] = frozenset(),
    gradients_stand: bool = True,
) -> Course:
    """The course of a layer under `fates`.

    `leaving` are storages that others refer to when the call is over, so that they stand to its end; those `elsewhere`
    are held by another layer as well, and count there. `gradients_stand`: parameters have gradients already, to which
    new ones are added.
    """
    forward, starts = _forward(fates, costs, leaving)
    backward = _Backward(fates, costs, elsewhere, gradients_stand)
    backward.run()
    swaps = [
        Swap(storage, backward.bytes_of(storage), starts[storage], *backward.span_of(storage))
        for storage in fates.swapped
    ]
    return Course(
        fates=fates,
        forward=forward,
        backward=tuple(backward.slices),
        held_bytes=backward.held_bytes,
        left_bytes=backward.standing,
        swaps=tuple(sorted(swaps, key=lambda swap: swap.produced)),
    )


def own_held(fates: Fates) -> set[int]:
    """Storages that a layer holds and that are not constants of all layers."""
    return {each for each in fates.held if not fates.graph.storages[each].constant}


def _forward(fates: Fates, costs: Costs, leaving: frozenset[int]) -> tuple[tuple[Slice, ...], dict[int, int]]:
    """The slices, and at which of them each storage is there."""
    graph = fates.graph
    made, going = _births_and_deaths(graph, own_held(fates) | fates.swapped | leaving)
    inputs = [s for s, storage in enumerate(graph.storages) if storage.kind == "input" and not storage.constant]
    standing = sum(costs.rounded(graph.storages[each].num_bytes) for each in inputs)
    overhead, waited = costs.watch_seconds if fates.replayed else 0.0, 0.0
    slices: list[Slice] = []
    starts = dict.fromkeys(inputs, 0)
    for index, op in enumerate(graph.ops):
        waited += overhead
        standing += sum(costs.rounded(graph.storages[each].num_bytes) for each in made[index])
        starts.update(dict.fromkeys(made[index], len(slices)))
        if not op.view:
            stands = standing + costs.op_scratch(graph, index)
            slices.append(Slice(op.path, False, costs.op_seconds(graph, index) + waited, stands))
            waited = 0.0
        standing -= sum(costs.rounded(graph.storages[each].num_bytes) for each in going[index])
    return tuple(slices), starts


def _births_and_deaths(graph: RegionGraph, stays: Iterable[int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Storages that each op makes, and those that nobody needs, or has a name for, after it."""
    ends: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in (*op.inputs, *op.outputs):
            ends[graph.values[value].storage] = index
    ends |= {index: each.named_until for index, each in enumerate(graph.storages) if each.named_until is not None}
    staying = set(stays)
    made: dict[int, list[int]] = defaultdict(list)
    going: dict[int, list[int]] = defaultdict(list)
    for storage, index in graph.creators.items():
        made[index].append(storage)
        if storage not in staying:
            going[ends[storage]].append(storage)
    return made, going


class _Backward:
    """Plays the backward pass through; bytes are those of the layer's own memory."""

    def __init__(self, fates: Fates, costs: Costs, elsewhere: frozenset[int], gradients_stand: bool) -> None:
        self.slices: list[Slice] = []
        self._fates = fates
        self._graph = fates.graph
        self._costs = costs
        self._gradients_stand = gradients_stand
        self._holding = own_held(fates) - elsewhere
        self.held_bytes = self.standing = sum(map(self.bytes_of, self._holding))
        self._uses = Counter(self._graph.packed_counts)
        for index in fates.replayed:
            self._uses.update(self._graph.ops[index].inputs)
        self._swap_uses = self._count_swap_uses()
        self._done: Counter[int] = Counter()
        self._remade: dict[int, set[int]] = defaultdict(set)  # storage -> its values that stand, made again
        self._pins: Counter[int] = Counter()  # storage -> saved tensors picked up and not yet let go
        self._sources: dict[int, frozenset[int]] = {}
        self._dependents = Counter(source for value in self._graph.packed for source in self._sources_of(value))
        self._needed: dict[int, int] = {}
        self._let_go: dict[int, int] = {}

    def bytes_of(self, storage: int) -> int:
        """Bytes that a storage takes."""
        return self._costs.rounded(self._graph.storages[storage].num_bytes)

    def span_of(self, storage: int) -> tuple[int, int]:
        """From which slice to which a swapped storage has to be here."""
        last = max(len(self.slices) - 1, 0)
        return min(self._needed.get(storage, last), last), min(self._let_go.get(storage, last), last)

    def run(self) -> None:
        """All of it."""
        picked_up: set[int] = set()
        for op in self._graph.backward:
            for position in op.unpacks:
                self._pick_up(self._graph.packed[position])
            picked_up.update(op.unpacks)
            self._run_step_op(op)
            for position in op.releases:
                self._let(self._graph.packed[position], was_picked_up=position in picked_up)

    def _run_step_op(self, op: StepOp) -> None:
        seconds = self._costs.step_op_seconds(op)
        self.standing += op.allocated_bytes
        freed = op.freed_bytes
        if self._gradients_stand and op.accumulated_bytes:
            seconds += op.accumulated_bytes / self._costs.accumulate_bytes_per_second
            freed += op.accumulated_bytes
        if seconds or op.allocated_bytes:
            stands = self.standing + self._costs.step_op_scratch(op)
            for_weights = bool(op.gradient_bytes or op.accumulated_bytes)
            self.slices.append(Slice(op.name, False, seconds, stands, for_weights))
        self.standing -= freed

    def _pick_up(self, value: int) -> None:
        storage = self._graph.values[value].storage
        if storage in self._fates.swapped:
            self._pins[storage] += 1
            self._take(storage)
        elif self._is_remade(storage):
            self._produce(value)
            self._pins[storage] += 1
            self._count_use(value)

    def _let(self, value: int, *, was_picked_up: bool) -> None:
        storage = self._graph.values[value].storage
        if was_picked_up and (storage in self._fates.swapped or self._is_remade(storage)):
            self._pins[storage] -= 1
            self._free_if_idle(storage)
        for source in self._sources_of(value):
            self._dependents[source] -= 1
            if not self._dependents[source] and source in self._holding:
                self._holding.remove(source)
                self.standing -= self.bytes_of(source)

    def _produce(self, wanted: int) -> None:
        pending = [wanted]
        while pending:
            value = pending[-1]
            if not self._is_missing(value):
                pending.pop()
                continue
            producer = self._graph.values[value].producer
            assert producer is not None, "what comes from outside is held or swapped"
            missing = [each for each in self._graph.ops[producer].inputs if self._is_missing(each)]
            if missing:
                pending.extend(missing)
            else:
                pending.pop()
                self._run_again(producer)

    def _run_again(self, index: int) -> None:
        op = self._graph.ops[index]
        for value in op.inputs:
            if self._graph.values[value].storage in self._fates.swapped:
                self._needed.setdefault(self._graph.values[value].storage, len(self.slices))
        made = {self._graph.values[value].storage for value in op.outputs}
        fresh = {each for each in made if self._graph.creators.get(each) == index and not self._stands(each)}
        self.standing += sum(map(self.bytes_of, fresh))
        seconds = self._costs.replay_seconds + (0.0 if op.view else self._costs.op_seconds(self._graph, index))
        if seconds:
            stands = self.standing + (0 if op.view else self._costs.op_scratch(self._graph, index))
            self.slices.append(Slice(op.path, True, seconds, stands))
        for value in op.outputs:
            if self._uses[value] and self._is_remade(self._graph.values[value].storage):
                self._remade[self._graph.values[value].storage].add(value)
        self.standing -= sum(self.bytes_of(each) for each in fresh if not self._stands(each))
        for value in op.inputs:
            storage = self._graph.values[value].storage
            if storage in self._fates.swapped:
                self._take(storage)
            elif self._is_remade(storage):
                self._count_use(value)

    def _is_remade(self, storage: int) -> bool:
        """Whether nothing else than running ops again gives this storage."""
        return self._graph.storages[storage].kind == "op" and not (
            storage in self._fates.held or storage in self._fates.swapped
        )

    def _is_missing(self, value: int) -> bool:
        storage = self._graph.values[value].storage
        return self._is_remade(storage) and value not in self._remade[storage]

    def _stands(self, storage: int) -> bool:
        return bool(self._remade[storage]) or self._pins[storage] > 0

    def _take(self, storage: int) -> None:
        self._needed.setdefault(storage, len(self.slices))
        self._swap_uses[storage] -= 1
        self._free_if_idle(storage)

    def _count_use(self, value: int) -> None:
        self._done[value] += 1
        if self._done[value] >= self._uses[value]:
            storage = self._graph.values[value].storage
            self._remade[storage].discard(value)
            self._free_if_idle(storage)

    def _free_if_idle(self, storage: int) -> None:
        if storage in self._fates.swapped:
            if self._swap_uses[storage] <= 0 and not self._pins[storage]:
                self._let_go.setdefault(storage, max(len(self.slices) - 1, 0))
        elif not self._stands(storage):
            self.standing -= self.bytes_of(storage)

    def _count_swap_uses(self) -> Counter[int]:
        uses: Counter[int] = Counter()
        for value, count in self._uses.items():
            if self._graph.values[value].storage in self._fates.swapped:
                uses[self._graph.values[value].storage] += count
        return uses

    def _sources_of(self, value: int) -> frozenset[int]:
        """Storages, held or swapped, from which a value can be had."""
        known = self._sources.get(value)
        if known is not None:
            return known
        storage, producer = self._graph.values[value].storage, self._graph.values[value].producer
        if storage in self._fates.held or storage in self._fates.swapped:
            found = frozenset([storage])
        elif producer is None or not self._is_remade(storage):
            found = frozenset()
        else:
            found = frozenset[int]().union(*map(self._sources_of, self._graph.ops[producer].inputs))
        self._sources[value] = found
        return found
