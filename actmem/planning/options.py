"""What can be done with one layer: the plans for it that are worth choosing among.

An option costs seconds (ops run again, copying that holds the computing up), bytes that stand until the backward pass,
bytes that go over a link, and bytes that stand at the peak of the layer's own backward pass. For prices on seconds and
held bytes alone the best one is a minimum cut; walking through all ratios of the two prices gives the corners of the
trade-off. Between the corners, and for the peaks, single storages are then saved or made again in turn, for as long as
that finds options that no other beats in every respect. Each is played through on the graph, so its figures are those
of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product

from actmem.graph import COMMUNICATION, RegionGraph
from actmem.planning.course import Course, own_held
from actmem.planning.fates import Fates, fates_under, path_of_storage, resolve
from actmem.planning.min_cut import cheapest
from actmem.planning.plan import Action, RuleSet, Tier
from actmem.planning.policies import POLICIES, SWAPPING
from actmem.planning.simulation import LayerPlan
from actmem.planning.terrain import Terrain

_MOST_OPTIONS = 48
"""Of one layer, before swapping."""
_FEW = 600
"""If there is no more to choose from, all of it is played through."""
_MOST_TRIED = 500
"""How many are played through between the corners."""
_MOST_SWAPPED = 10
"""Numbers of storages, the largest first, that are tried in place of holding them."""
_SCALE = 2**40
"""Prices of a cut are whole numbers; this many make up the most expensive one."""
_DEAR = 1000
"""At a price at which all storages together cost so many times as much as all ops, bytes alone count."""


@dataclass(frozen=True)
class Option:
    """One plan for one layer: what is saved and what is swapped, by path; all else is made again. `held_bytes` stand
    until the backward pass, beside `shared` storages, which others may hold as well. `lean_peak_bytes` is the peak of
    the backward pass where those of them that earlier layers may hold count there."""

    saved: frozenset[str]
    swapped: tuple[tuple[str, Tier], ...]
    plan: LayerPlan = field(compare=False)
    course: Course = field(compare=False)
    seconds: float = field(compare=False)
    held_bytes: int = field(compare=False)
    shared: frozenset[int] = field(compare=False)
    lean_peak_bytes: int = field(compare=False)

    @cached_property
    def swapped_bytes(self) -> dict[Tier, int]:
        """Bytes that go to each tier and back."""
        total: dict[Tier, int] = {}
        for swap in self.course.swaps:
            tier = self.plan.tiers[swap.storage]
            total[tier] = total.get(tier, 0) + swap.num_bytes
        return total

    @property
    def fates(self) -> Fates:
        """What becomes of each storage."""
        return self.plan.fates

    @property
    def key(self) -> Hashable:
        """Equal for options that do the same."""
        return self.plan.key

    def late_bytes(self, tier: Tier, bytes_per_second: float) -> int:
        """Bytes that are still on their way to a tier when the layer's forward pass is over, over a link that had
        nothing else to do."""
        ends = list(accumulate(each.seconds for each in self.course.forward)) or [0.0]
        free, late = 0.0, 0
        for swap in self.course.swaps:
            if self.plan.tiers[swap.storage] == tier:
                free = max(free, ends[swap.produced]) + swap.num_bytes / bytes_per_second
                late += swap.num_bytes if free > ends[-1] else 0
        return late

    def grace_bytes(self, tier: Tier, bytes_per_second: float) -> float:
        """Bytes that may still be missing when the layer's backward pass begins, so that nothing has to be waited for:
        what was made last comes back first, and the rest comes over the link meanwhile."""
        starts = [0.0, *accumulate(each.seconds for each in self.course.backward)]
        grace, missing = math.inf, self.swapped_bytes.get(tier, 0)
        for swap in reversed(self.course.swaps):
            if self.plan.tiers[swap.storage] == tier:
                missing -= swap.num_bytes
                grace = min(grace, starts[swap.needed] * bytes_per_second + missing)
        return 0.0 if grace == math.inf else grace

    def largest_copy(self, tier: Tier) -> int:
        """Bytes of the largest storage that goes to a tier."""
        return max((swap.num_bytes for swap in self.course.swaps if self.plan.tiers[swap.storage] == tier), default=0)

    def beats(self, other: Option) -> bool:
        """Whether it is nowhere worse, for options that swap nothing."""
        mine, theirs = self.figures, other.figures
        return self.shared <= other.shared and all(a <= b for a, b in zip(mine, theirs, strict=True))

    @cached_property
    def figures(self) -> tuple[float, ...]:
        """What it costs, in each respect."""
        course = self.course
        peaks = course.backward_peak_bytes, self.lean_peak_bytes, course.forward_peak_bytes
        return self.seconds, self.held_bytes, *peaks


class OptionMaker:
    """The options of one layer, as `terrain` has it. `tiers` may take swapped storages of at least
    `min_swap_bytes`."""

    def __init__(self, terrain: Terrain, layer: int, *, tiers: tuple[Tier, ...], min_swap_bytes: int) -> None:
        self._terrain = terrain
        self._layer = layer
        self._tiers = tiers
        self._min_swap_bytes = min_swap_bytes
        self.graph: RegionGraph = terrain.layers[layer]
        self._sharing = terrain.sharing(layer)
        self._paths = {
            storage: path_of_storage(self.graph, storage)
            for storage in self.graph.creators
            if _is_free(self.graph, storage)
        }
        self._op_seconds = [terrain.op_seconds(layer, index) for index in range(len(self.graph.ops))]
        self._known: dict[object, Option] = {}
        self._base_seconds = 0.0
        self.unplanned = self._option(frozenset(self._paths.values()), ())

    @cached_property
    def options(self) -> list[Option]:
        """All that are worth it, those that swap included."""
        corners = self._corners()
        plain = self._all(()) or self._between(corners)
        swapping = self._all(self._tiers) or [*self._swapping(corners), *self._fixed()]
        return list({option.key: option for option in [*plain, *swapping]}.values())

    def option_of(self, plan: LayerPlan) -> Option:
        """What does the same as a plan for the layer."""
        fates = plan.fates
        away = {path_of_storage(self.graph, each): plan.tiers[each] for each in sorted(fates.swapped)}
        saved = frozenset(self._paths[each] for each in fates.held if each in self._paths)
        return self._option(saved, tuple(sorted(away.items())))

    def changed(self, option: Option) -> Iterator[Option]:
        """Options that do something else with one path: one that is made again is saved, one that is saved is made
        again, and one is swapped that was not, or the other way round."""
        yield from (self._option(saved, option.swapped) for saved in self._neighbours(option))
        for path, tier in option.swapped:
            rest = tuple(each for each in option.swapped if each != (path, tier))
            yield from (self._option(saved, rest) for saved in (option.saved, option.saved | {path}))
        for path in self._movable(option) if self._tiers else ():
            yield from (self._option(option.saved - {path}, (*option.swapped, (path, tier))) for tier in self._tiers)

    def _all(self, tiers: tuple[Tier, ...]) -> list[Option]:
        """Whatever can be done, with swaps to `tiers`, where that is not too much; else nothing."""
        ways: dict[str, dict[Action | Tier, None]] = {}
        for index, storage in enumerate(self.graph.storages):
            if storage.kind != "parameter":
                mine = ways.setdefault(path_of_storage(self.graph, index), {Action.SAVE: None})
                mine |= {Action.RECOMPUTE: None} if index in self._paths else {}
                mine |= dict.fromkeys(tiers) if self._may_leave(index) else {}
        if math.prod(map(len, ways.values())) > _FEW:
            return []
        return [self._with_all(dict(zip(ways, taken, strict=True))) for taken in product(*ways.values())]

    def _with_all(self, taken: dict[str, Action | Tier]) -> Option:
        saved = frozenset(path for path, way in taken.items() if way is Action.SAVE)
        return self._option(saved, tuple((path, way) for path, way in taken.items() if not isinstance(way, Action)))

    def _option(self, saved: frozenset[str], swapped: tuple[tuple[str, Tier], ...]) -> Option:
        """An option, with what it saves in vain left out."""
        wanted = {**dict.fromkeys(saved, Action.SAVE), **{path: Action.SWAP for path, _ in swapped}}
        key = (saved, swapped)
        if key in self._known:
            return self._known[key]
        fates = resolve(
            self.graph,
            lambda path: wanted.get(path, Action.RECOMPUTE),
            min_swap_bytes=self._min_swap_bytes,
            communicates_again=lambda path: path not in wanted,
        )
        used = {self._paths[storage] for storage in fates.held if storage in self._paths}
        gone = {path_of_storage(self.graph, storage) for storage in fates.swapped}
        tier_of = dict(swapped)
        tiers = {storage: tier_of[path_of_storage(self.graph, storage)] for storage in fates.swapped}
        own = frozenset(own_held(fates))
        course = self._terrain.course_of(self._layer, fates, own & self._sharing.outside)
        lean = self._terrain.course_of(self._layer, fates, own & (self._sharing.outside | self._sharing.earlier))
        shared = own & self._sharing.own
        seconds = course.forward_seconds + course.backward_seconds
        seconds += sum(self._terrain.copy_seconds(tiers[swap.storage], swap.num_bytes) for swap in course.swaps)
        if not self._known:
            self._base_seconds = seconds
        seconds -= self._base_seconds
        option = Option(
            saved=saved & used,
            swapped=tuple(each for each in swapped if each[0] in gone),
            plan=LayerPlan(fates, tiers),
            course=course,
            seconds=seconds,
            held_bytes=course.held_bytes - sum(map(self._bytes_of, shared)),
            shared=shared,
            lean_peak_bytes=lean.backward_peak_bytes,
        )
        self._known[key] = option
        return option

    def _bytes_of(self, storage: int) -> int:
        return self._terrain.conditions.costs.rounded(self.graph.storages[storage].num_bytes)

    def _corners(self) -> list[Option]:
        """The corners of the trade-off of seconds for bytes, from nothing made again to all of it."""
        total = sum(each.num_bytes for each in self.graph.storages) or 1
        first, last = self.unplanned, self._cut(_DEAR * (sum(self._op_seconds) or 1.0) / total)
        found = {option.fates.key: option for option in (first, last)}
        pending = [(first, last)]
        while pending:
            more, less = pending.pop()
            saved_bytes = more.course.held_bytes - less.course.held_bytes
            if saved_bytes <= 0:
                continue
            between = self._cut((less.seconds - more.seconds) / saved_bytes)
            if between.fates.key not in found:
                found[between.fates.key] = between
                pending += [(more, between), (between, less)]
        return list(found.values())

    def _cut(self, price: float) -> Option:
        """The best option where holding a byte costs `price` seconds."""
        most = max(price * sum(each.num_bytes for each in self.graph.storages), sum(self._op_seconds)) or 1.0
        scale = _SCALE / most
        held = cheapest(
            self.graph,
            hold_price=lambda storage: round(
                scale * price * (storage not in self._sharing.outside) * self.graph.storages[storage].num_bytes
            ),
            run_price=lambda op: round(scale * self._op_seconds[op]),
            is_free=lambda storage: _is_free(self.graph, storage),
        )
        return self._option(frozenset(self._paths[each] for each in held if each in self._paths), ())

    def _between(self, corners: list[Option]) -> list[Option]:
        """The corners and what lies between them: options that no other beats, found by changing one path at a time."""
        best = _unbeaten(corners)
        tried: set[frozenset[str]] = set()
        left = _MOST_TRIED
        while left > 0 and (new := [option for option in best if option.saved not in tried]):
            for option in new:
                tried.add(option.saved)
                neighbours = [self._option(saved, ()) for saved in self._neighbours(option)]
                best += neighbours
                left -= len(neighbours)
                if left <= 0:
                    break
            best = _unbeaten(best)
        return _thinned(best, set(map(id, corners)))

    def _neighbours(self, option: Option) -> Iterator[frozenset[str]]:
        """What saves one path more that is made again, or one less."""
        remade = {
            self._paths[storage] for storage in self._paths if self.graph.creators[storage] in option.fates.replayed
        }
        yield from (option.saved | {path} for path in remade)
        yield from (option.saved - {path} for path in option.saved)

    def _swapping(self, plain: Iterable[Option]) -> Iterator[Option]:
        """Options that move away, instead of holding, the largest storages of another one."""
        for option in plain if self._tiers else ():
            paths = self._movable(option)
            for tier in self._tiers:
                for count in range(1, min(len(paths), _MOST_SWAPPED) + 1):
                    away = tuple((path, tier) for path in paths[:count])
                    yield self._option(option.saved - set(paths[:count]), away)

    def _movable(self, option: Option) -> list[str]:
        """Paths of what is held and may be swapped instead, the largest first."""
        held = [each for each in option.fates.held if self._may_leave(each)]
        held.sort(key=lambda storage: (-self.graph.storages[storage].num_bytes, storage))
        return list(dict.fromkeys(path_of_storage(self.graph, storage) for storage in held))

    def _fixed(self) -> Iterator[Option]:
        """What the fixed policies do."""
        usual: Tier = self._tiers[0] if self._tiers else "host"
        for policy in POLICIES:
            if self._tiers or policy not in SWAPPING:
                rules = RuleSet(POLICIES[policy](self.graph))
                fates = fates_under(self.graph, rules, min_swap_bytes=self._min_swap_bytes)
                yield self.option_of(LayerPlan(fates, dict.fromkeys(fates.swapped, usual)))

    def _may_leave(self, storage: int) -> bool:
        each = self.graph.storages[storage]
        movable = each.kept is None and not (each.edited or each.constant or each.spread)
        return movable and each.num_bytes >= max(self._min_swap_bytes, 1)


def _is_free(graph: RegionGraph, storage: int) -> bool:
    """Whether a plan decides about a storage: an op of the layer makes it, and only a collective may keep it."""
    each = graph.storages[storage]
    return each.kind == "op" and each.kept in (None, COMMUNICATION)


def _unbeaten(options: Iterable[Option]) -> list[Option]:
    """Those that no other is at least as good as in every respect, the fastest first."""
    best: list[Option] = []
    for option in sorted({each.fates.key: each for each in options}.values(), key=lambda each: each.figures):
        if not any(other.beats(option) for other in best):
            best.append(option)
    return best


def _thinned(options: list[Option], corners: set[int]) -> list[Option]:
    """At most `_MOST_OPTIONS`: of those that are closest to the next one, one after the other goes, but no corner."""
    if len(options) <= _MOST_OPTIONS:
        return options
    seconds = max(each.seconds for each in options) or 1.0
    held = max(each.held_bytes for each in options) or 1
    peak = max(each.course.backward_peak_bytes for each in options) or 1
    kept = list(options)
    while len(kept) > _MOST_OPTIONS:
        gaps = [
            math.inf
            if id(b) in corners
            else abs(a.seconds - b.seconds) / seconds
            + abs(a.held_bytes - b.held_bytes) / held
            + abs(a.course.backward_peak_bytes - b.course.backward_peak_bytes) / peak
            for a, b in pairwise(kept)
        ]
        if min(gaps) == math.inf:
            break
        del kept[gaps.index(min(gaps)) + 1]
    return kept
