"""Which bytes of a growing space are in use. Pure arithmetic: the space may be a file or pinned memory.

Sizes are exact up to `granularity`. The best fit is taken; where no free range is long enough, several together serve,
so that the space grows only when too few bytes are free in all. What is freed joins its free neighbours.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_GROWTH_SHARE = 32  # the space grows by a 32nd of itself at a time, so that little of it is ever in vain


@dataclass(frozen=True, slots=True)
class Range:
    """`num_bytes` from `start` on."""

    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first byte behind."""
        return self.start + self.num_bytes


class RangeAllocator:
    """Hands out ranges of a space that `grow(start, num_bytes)` lengthens; `limit` bounds it (``None``: nothing does).

    The space grows by multiples of powers of two between `min_slab` and `max_slab`, and last by what the limit leaves.
    `grow` may raise `OSError` or `RuntimeError` where there is no more; then `allocate` raises it and nothing has
    changed. Safe to use from several threads, and `free` also from a finalizer that the garbage collector runs in the
    middle of `allocate`.
    """

    def __init__(
        self,
        grow: Callable[[int, int], None],
        *,
        granularity: int,
        limit: int | None,
        min_slab: int,
        max_slab: int,
    ) -> None:
        self._grow_space = grow
        self._granularity = granularity
        self._limit = limit
        self._min_slab = min_slab
        self._max_slab = max_slab
        self._lock = threading.Lock()
        self._free: list[Range] = []  # by start, never touching one another
        self._returned: deque[Sequence[Range]] = deque()  # freed, but not yet in `_free`
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.high_water_bytes = 0
        self.num_hits = 0
        self.num_growths = 0

    @property
    def free_bytes(self) -> int:
        """What can be had without growing."""
        return self.reserved_bytes - self.used_bytes

    def allocate(self, num_bytes: int) -> tuple[Range, ...] | None:
        """Ranges of `num_bytes` together, rounded up to the granularity; ``None`` where the limit leaves too little."""
        wanted = -(-num_bytes // self._granularity) * self._granularity
        with self._lock:
            self._take_back()
            missing = wanted - self.free_bytes
            if missing > 0 and not self._grow_by(missing):
                return None
            self.num_hits += missing <= 0
            ranges = self._take(wanted)
            if sum(each.num_bytes for each in ranges) != wanted:  # a signal broke into the record of what is free
                raise OSError(
                    errno.EIO, "the record of free ranges is broken, since an interrupt came while it changed"
                )
            self.used_bytes += wanted
            self.high_water_bytes = max(self.high_water_bytes, self.used_bytes)
            return ranges

    def free(self, ranges: Sequence[Range]) -> None:
        """Take ranges back that `allocate` gave out."""
        self._returned.append(ranges)
        if self._lock.acquire(blocking=False):  # else whoever has the lock may be this very thread
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            for each in self._returned.popleft():
                self.used_bytes -= each.num_bytes
                self._put(each)

    def _grow_by(self, missing: int) -> bool:
        slab = self._min_slab
        while slab * 2 * _GROWTH_SHARE <= self.reserved_bytes and slab < self._max_slab:
            slab *= 2
        growth = -(-missing // slab) * slab
        if self._limit is not None and self.reserved_bytes + growth > self._limit:
            growth = (self._limit - self.reserved_bytes) // self._granularity * self._granularity
            if growth < missing:
                return False
        self._grow_space(self.reserved_bytes, growth)
        self._put(Range(self.reserved_bytes, growth))
        self.reserved_bytes += growth
        self.num_growths += 1
        return True

    def _take(self, wanted: int) -> tuple[Range, ...]:
        whole = min((each for each in self._free if each.num_bytes >= wanted), key=_num_bytes, default=None)
        if whole is not None:
            return (self._cut(whole, wanted),)
        taken: list[Range] = []
        for each in sorted(self._free, key=_num_bytes, reverse=True):
            taken.append(self._cut(each, min(wanted, each.num_bytes)))
            wanted -= taken[-1].num_bytes
            if not wanted:
                break
        return tuple(taken)

    def _cut(self, free: Range, num_bytes: int) -> Range:
        self._free.remove(free)
        if free.num_bytes > num_bytes:
            insort(self._free, Range(free.start + num_bytes, free.num_bytes - num_bytes), key=_start)
        return Range(free.start, num_bytes)

    def _put(self, freed: Range) -> None:
        index = bisect_left(self._free, freed.start, key=_start)
        start, end = freed.start, freed.end
        if index < len(self._free) and self._free[index].start == end:
            end = self._free.pop(index).end
        if index and self._free[index - 1].end == start:
            start = self._free.pop(index - 1).start
        insort(self._free, Range(start, end - start), key=_start)


def _num_bytes(each: Range) -> int:
    return each.num_bytes


def _start(each: Range) -> int:
    return each.start
