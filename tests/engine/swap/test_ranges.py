"""Ranges never overlap, add up exactly, join again when freed, and little of the space is in vain."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import MIB

from actmem.runtime.swap.host import SlabPool
from actmem.runtime.swap.ranges import Range, RangeAllocator

BLOCK = 4096


def allocator(
    limit: int | None = None,
    *,
    granularity: int = BLOCK,
    min_slab: int = MIB,
    max_slab: int = 2**28,
    grow: Callable[[int, int], None] | None = None,
) -> RangeAllocator:
    """As the disk tier has it."""
    return RangeAllocator(
        grow or (lambda start, num_bytes: None),
        granularity=granularity,
        limit=limit,
        min_slab=min_slab,
        max_slab=max_slab,
    )


def check(ranges: RangeAllocator, taken: Sequence[Sequence[Range]]) -> None:
    """What is taken and what is free are disjoint, and are the whole space."""
    held = [each for some in taken for each in some]
    everything = sorted([*held, *ranges._free], key=lambda each: each.start)
    assert all(each.num_bytes > 0 for each in everything)
    assert [each.start for each in everything] == [0, *[each.end for each in everything[:-1]]][: len(everything)]
    assert sum(each.num_bytes for each in everything) == ranges.reserved_bytes
    assert sum(each.num_bytes for each in held) == ranges.used_bytes
    free = sorted(ranges._free, key=lambda each: each.start)
    assert ranges._free == free
    assert all(left.end < right.start for left, right in pairwise(free)), "neighbours have joined"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_model_of_the_allocator(data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([None, 64, 200, 512]))
    grown: list[tuple[int, int]] = []
    ranges = allocator(
        limit, granularity=4, min_slab=16, max_slab=64, grow=lambda start, size: grown.append((start, size))
    )
    taken: list[tuple[Range, ...]] = []
    high_water = 0
    for _ in range(data.draw(st.integers(0, 30))):
        if taken and data.draw(st.booleans()):
            ranges.free(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            wanted = data.draw(st.integers(1, 100))
            rounded = -(-wanted // 4) * 4
            before, room = ranges.reserved_bytes, ranges.free_bytes
            got = ranges.allocate(wanted)
            if got is None:
                assert limit is not None and before + rounded - room > limit and ranges.reserved_bytes == before
            else:
                assert sum(each.num_bytes for each in got) == rounded
                assert (ranges.reserved_bytes == before) == (rounded <= room), "grown only when too little is free"
                taken.append(got)
        high_water = max(high_water, ranges.used_bytes)
        check(ranges, taken)
        assert ranges.high_water_bytes == high_water
        assert limit is None or ranges.reserved_bytes <= limit
    assert [start for start, _ in grown] == [sum(size for _, size in grown[:index]) for index in range(len(grown))]
    assert all(size % 16 == 0 for _, size in grown[:-1])
    for each in taken:
        ranges.free(each)
    assert len(ranges._free) == (ranges.reserved_bytes > 0) and ranges.used_bytes == 0


def layer_sizes(source: random.Random) -> list[int]:
    """Storages of a decoder layer: a few sizes that recur, in bytes."""
    batch = source.choice([2, 2, 2, 3])
    tokens = batch * 1024
    widths = [2048, 2048, 1024, 256, 256, 2048, 2048, 5632, 5632, 5632, 8]
    return [tokens * width * 2 + 512 * source.randrange(2) for width in widths]


def random_sizes(source: random.Random) -> list[int]:
    """Anything from a byte to 64 MiB."""
    return [int(2 ** source.uniform(0, 26)) for _ in range(11)]


@pytest.mark.parametrize("sizes", [layer_sizes, random_sizes], ids=lambda each: each.__name__)
def test_ten_thousand_cycles_waste_little_and_stay_under_the_cap(
    sizes: Callable[[random.Random], list[int]],
) -> None:
    source = random.Random(1)
    cap = 6 * 2**30
    ranges = allocator(cap)
    taken: list[tuple[Range, ...]] = []
    num_cycles = pieces = 0
    while num_cycles < 10_000:
        for _ in range(source.randint(4, 12)):  # a forward pass …
            for size in sizes(source):
                got = ranges.allocate(size)
                num_cycles += 1
                if got is not None:
                    taken.append(got)
                    pieces = max(pieces, len(got))
        if source.random() < 0.2:
            source.shuffle(taken)
        while taken and (len(taken) > 40 or source.random() < 0.98):  # … and a backward pass
            ranges.free(taken.pop())
    check(ranges, taken)
    assert ranges.reserved_bytes <= cap
    assert ranges.reserved_bytes <= ranges.high_water_bytes * 1.05
    assert pieces < 200


def test_a_cap_that_is_reached_gives_nothing_and_loses_nothing() -> None:
    ranges = allocator(8 * MIB)
    first = ranges.allocate(5 * MIB)
    assert first is not None and ranges.allocate(4 * MIB) is None
    second = ranges.allocate(3 * MIB)
    assert second is not None and ranges.reserved_bytes == 8 * MIB
    ranges.free(first)
    assert ranges.allocate(5 * MIB) is not None and ranges.num_growths == 2


@pytest.mark.parametrize("limit", [3 * BLOCK, MIB // 2, MIB + MIB // 2])
def test_a_cap_between_slabs_can_be_used_to_the_last_block(limit: int) -> None:
    ranges = allocator(limit + 7)
    found = 0
    while ranges.allocate(BLOCK) is not None:
        found += BLOCK
    assert found == ranges.reserved_bytes == limit


def test_a_space_that_cannot_grow_is_as_it_was() -> None:
    def fail(start: int, num_bytes: int) -> None:
        if start:
            raise OSError("full")

    ranges = allocator(grow=fail)
    first = ranges.allocate(MIB)
    assert first is not None
    with pytest.raises(OSError, match="full"):
        ranges.allocate(MIB)
    check(ranges, [first])
    ranges.free(first)
    assert ranges.allocate(MIB) is not None


def test_ranges_freed_by_other_threads() -> None:
    ranges = allocator()
    taken: list[tuple[Range, ...]] = []
    done = threading.Event()

    def free() -> None:
        while not done.is_set() or taken:  # in this order: once it is set, nothing more is taken
            try:
                ranges.free(taken.pop())
            except IndexError:
                continue

    threads = [threading.Thread(target=free) for _ in range(3)]
    for each in threads:
        each.start()
    source = random.Random(0)
    for _ in range(3000):
        got = ranges.allocate(source.randrange(1, 40 * BLOCK))
        assert got is not None
        taken.append(got)
    done.set()
    for each in threads:
        each.join(timeout=20)
        assert not each.is_alive()
    ranges.free(())
    check(ranges, [])
    assert ranges.used_bytes == 0


def test_a_finalizer_in_the_middle_of_allocate_neither_blocks_nor_breaks_anything() -> None:
    """The garbage collector may run anywhere, and what it frees on the way gives its range back."""

    class Holder:
        pass

    def collect(start: int, num_bytes: int) -> None:
        gc.collect()

    ranges = allocator(grow=collect)
    kept = ranges.allocate(MIB)
    lost = ranges.allocate(MIB)
    assert kept is not None and lost is not None
    holder = Holder()
    holder.itself = holder  # type: ignore[attr-defined]
    weakref.finalize(holder, ranges.free, lost)
    del holder
    worker = threading.Thread(target=ranges.allocate, args=(3 * MIB,), daemon=True)
    worker.start()
    worker.join(timeout=10)
    assert not worker.is_alive(), "allocate waits for itself"
    ranges.free(())
    assert ranges.used_bytes == 4 * MIB and ranges.reserved_bytes == 5 * MIB


# The pool of host memory


def test_a_pools_memory_is_exact_and_holds_what_is_written() -> None:
    source = random.Random(3)
    pool = SlabPool(64 * MIB, pinned=False)
    written: list[tuple[tuple[Range, ...], list[torch.Tensor], int]] = []
    for number in range(600):
        num_bytes = int(2 ** source.uniform(0, 22))
        ranges, marks = pool.allocate(num_bytes)
        assert marks == []
        if ranges is not None:
            pieces = pool.memory_of(ranges, num_bytes)
            assert sum(piece.numel() for piece in pieces) == num_bytes
            for piece in pieces:
                piece.fill_(number % 251)
            written.append((ranges, pieces, number % 251))
        while written and (ranges is None or source.random() < 0.45):
            ranges, pieces, expected = written.pop(source.randrange(len(written)))
            assert all(bool(piece.eq(expected).all()) for piece in pieces)
            pool.free(ranges, None)
        assert pool.ranges.reserved_bytes <= 64 * MIB
    assert pool.ranges.num_hits > 100
    slabs = pool._slabs._slabs
    assert all(slab.numel() & (slab.numel() - 1) == 0 for slab in slabs), "torch rounds pinned memory to powers of two"
    assert sum(slab.numel() for slab in slabs) == pool.ranges.reserved_bytes


@pytest.mark.parametrize("sizes", [layer_sizes, random_sizes], ids=lambda each: each.__name__)
def test_a_pool_of_pageable_slabs_wastes_little(sizes: Callable[[random.Random], list[int]]) -> None:
    """Sizes are those of layers, divided by 8: untouched memory costs nothing, but there is only so much of it."""
    source = random.Random(2)
    pool = SlabPool(1024 * MIB, pinned=False)
    taken: list[tuple[Range, ...]] = []
    for _ in range(100):
        for _ in range(source.randint(2, 10)):
            for size in sizes(source):
                ranges, _ = pool.allocate(max(1, size // 8))
                if ranges is not None:
                    taken.append(ranges)
        while taken and (len(taken) > 20 or source.random() < 0.98):
            pool.free(taken.pop(), None)
    check(pool.ranges, taken)
    assert pool.ranges.reserved_bytes <= 1024 * MIB
    assert pool.ranges.reserved_bytes <= max(
        pool.ranges.high_water_bytes * 1.05, pool.ranges.high_water_bytes + 4 * MIB
    )


@pytest.mark.parametrize(("limit", "room"), [(2 * MIB - 1, 0), (5 * MIB, 4 * MIB), (None, 8 * MIB)])
def test_a_pools_limit_holds_in_whole_slabs(limit: int | None, room: int) -> None:
    pool = SlabPool(limit, pinned=False)
    found = sum(pool.allocate(MIB)[0] is not None for _ in range(8)) * MIB
    assert found == room and pool.ranges.reserved_bytes <= (limit if limit is not None else 2**40)
