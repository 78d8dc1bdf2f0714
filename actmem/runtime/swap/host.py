"""The host tier: storages of an accelerator in pinned host memory.

Torch's own allocator of pinned memory rounds each request up to a power of two. The pool here asks it for such slabs
only, and hands out exact ranges of them. Order is kept by events alone: the host never waits for a copy.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from actmem.planning.plan import Tier
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.ranges import Range, RangeAllocator
from actmem.runtime.swap.tier import CopyEngine, Mark, SwapWarning

_GRANULARITY = 512
_MIN_SLAB, _MAX_SLAB = 2**21, 2**26
_CALLS_TO_LEAVE = 2  # a copy may take until the next region call has ended; then the compute stream waits for it


class SlabPool:
    """Exact ranges of host memory, at most `limit` bytes, pinned where that can be had.

    A range whose last copy may still be running comes back with its mark. It is used again once that has passed, or,
    where the pool would have to grow, at once by whoever lets its own copy wait for the mark.
    """

    def __init__(self, limit: int | None, *, pinned: bool = True) -> None:
        self._slabs = _Slabs(HostMemory(pinned=pinned))
        self._retiring: deque[tuple[Mark, tuple[Range, ...]]] = deque()
        self._owed: list[Mark] = []  # what the next range may have to wait for
        whole = None if limit is None else limit // _MIN_SLAB * _MIN_SLAB
        self.ranges = RangeAllocator(
            self._slabs.add, granularity=_GRANULARITY, limit=whole, min_slab=_MIN_SLAB, max_slab=_MAX_SLAB
        )
        self.memory_of = self._slabs.memory_of

    def allocate(self, num_bytes: int) -> tuple[tuple[Range, ...] | None, list[Mark]]:
        """Ranges of `num_bytes` in all, and what must have passed before they are written; ``None`` where the limit
        leaves too little."""
        while self._retiring and self._retiring[0][0].has_passed():
            self.ranges.free(self._retiring.popleft()[1])
        while self._retiring and self.ranges.free_bytes < num_bytes:
            mark, freed = self._retiring.popleft()
            self._owed.append(mark)
            self.ranges.free(freed)
        ranges = self.ranges.allocate(num_bytes)
        if ranges is None:
            return None, []
        # Copies outward keep their order: whatever is written later comes after these marks too.
        marks, self._owed = self._owed, []
        return ranges, marks

    def free(self, ranges: tuple[Range, ...], mark: Mark | None) -> None:
        """Take ranges back, whose last copy ends at `mark`."""
        if mark is None or mark.has_passed():
            self.ranges.free(ranges)
        else:
            self._retiring.append((mark, ranges))


class HostMemory:
    """Memory of the host, pinned as long as that can be had."""

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned

    def empty(self, size: int) -> Tensor:
        """`size` bytes. Raises `RuntimeError`, as torch does, where the machine has no memory left."""
        if self._pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                warnings.warn(
                    f"host memory cannot be pinned any further ({first_line(error)}): swapping goes on with pageable "
                    "memory, whose copies are slower and hold up the host; lower memory.host_limit, or raise the limit "
                    "on locked memory (ulimit -l)",
                    SwapWarning,
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8)


class _Slabs:
    """The pool's memory, one slab after the other."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._slabs: list[Tensor] = []
        self._starts: list[int] = []

    def memory_of(self, ranges: Sequence[Range], num_bytes: int) -> list[Tensor]:
        """The first `num_bytes` of `ranges`, as tensors of the slabs they lie in, one after the other."""
        pieces: list[Tensor] = []
        for each in ranges:
            start, end = each.start, min(each.end, each.start + num_bytes)
            num_bytes -= end - start
            while start < end:
                slab = bisect_right(self._starts, start) - 1
                begin = start - self._starts[slab]
                piece = self._slabs[slab][begin : begin + end - start]
                pieces.append(piece)
                start += piece.numel()
        return pieces

    def add(self, start: int, num_bytes: int) -> None:
        """Lengthen it from `start` on. Slabs are powers of two, so that torch's allocator wastes nothing."""
        slabs: list[Tensor] = []
        while num_bytes:
            size = min(1 << (num_bytes.bit_length() - 1), _MAX_SLAB)
            slabs.append(self._memory.empty(size))
            num_bytes -= size
        for slab in slabs:
            self._slabs.append(slab)
            self._starts.append(start)
            start += slab.numel()


class HostTier:
    """Storages of `engine`'s device in a pool of host memory."""

    name: Tier = "host"

    def __init__(self, engine: CopyEngine, pool: SlabPool, counters: SwapCounters) -> None:
        self.is_open = True
        self.engine = engine
        self.pool = pool
        self.counters = counters
        self._untimed: deque[tuple[str, Mark]] = deque()

    def offload(self, data: Tensor) -> HostCopy | None:
        """Start copying `data` to the pool."""
        try:
            ranges, marks = self.pool.allocate(data.numel())
        except RuntimeError as error:  # what torch raises where the machine has no memory left
            raise OSError(f"no host memory: {first_line(error)}") from error
        return None if ranges is None else HostCopy(self, data, ranges, marks)

    def usage(self) -> RangeAllocator:
        """What of the pool is in use."""
        return self.pool.ranges

    def wait(self, mark: Mark) -> None:
        """Let the current stream wait for `mark`, and count how long it did."""
        self.note_time("exposed_seconds", self.engine.wait(mark))

    def note_time(self, counter: str, mark: Mark) -> None:
        """Add the time of a copy to `counter` once it is known."""
        self._untimed.append((counter, mark))
        while self._untimed and (seconds := self._untimed[0][1].seconds()) is not None:
            name, _ = self._untimed.popleft()
            setattr(self.counters, name, getattr(self.counters, name) + seconds)


class HostCopy:
    """One storage in the pool."""

    place = "pinned host memory"

    def __init__(self, tier: HostTier, data: Tensor, ranges: tuple[Range, ...], marks: Sequence[Mark]) -> None:
        self.tier = tier
        self._ranges = ranges
        self._num_bytes = data.numel()
        self._device = data.device
        self._data: Tensor | None = data
        pieces = tier.pool.memory_of(ranges, self._num_bytes)
        sources = data.split([piece.numel() for piece in pieces])
        self._last = tier.engine.offload(list(zip(pieces, sources, strict=True)), [tier.engine.now(), *marks])
        tier.note_time("copy_out_seconds", self._last)

    def has_left(self, calls_since: int) -> bool:
        """Whether the original may go. When the next region call has ended it may in any case: then the current stream
        waits for the copy, not the host, so that the peak does not depend on how far the host runs ahead."""
        if not self._last.has_passed():
            if calls_since < _CALLS_TO_LEAVE:
                return False
            self.tier.wait(self._last)
        self._data = None
        return True

    def withdraw(self) -> bool:
        """Nothing on a stream can be taken back."""
        return False

    def begin_reload(self) -> HostReload:
        """Start copying to memory that the current stream allocates now."""
        target = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        pieces = self.tier.pool.memory_of(self._ranges, self._num_bytes)
        parts = target.split([piece.numel() for piece in pieces])
        engine = self.tier.engine
        self._last = engine.reload(list(zip(parts, pieces, strict=True)), [self._last, engine.now()])
        self.tier.note_time("copy_in_seconds", self._last)
        return HostReload(self.tier, self._last, target)

    def __del__(self) -> None:
        if not hasattr(self, "_last"):
            return
        if self._data is not None and not self._last.has_passed():
            self.tier.wait(self._last)  # the device's memory is free for others after the copy only
        self.tier.pool.free(self._ranges, self._last)


class HostReload:
    """A storage on its way back from the pool."""

    def __init__(self, tier: HostTier, mark: Mark, data: Tensor) -> None:
        self._tier = tier
        self._mark = mark
        self._data: Tensor | None = data

    def finish(self) -> Tensor:
        """The bytes; the current stream waits for them."""
        assert self._data is not None, "a reload is finished once"
        self._tier.wait(self._mark)
        data, self._data = self._data, None
        return data

    def is_there(self) -> bool:
        """Whether they have come."""
        return self._mark.has_passed()

    def __del__(self) -> None:
        if self._data is not None:
            self._mark.wait()


def first_line(error: Exception) -> str:
    """What torch's error says, without the C++ stack that it may add."""
    return str(error).partition("\n")[0]
