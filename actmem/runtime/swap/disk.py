"""The disk tier: storages in a scratch file, written and read by a few threads.

Memory of the CPU goes straight to the file and back. `StagedTier` puts host memory in between for other devices.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from actmem.planning.plan import Tier
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.ranges import Range, RangeAllocator
from actmem.runtime.swap.scratch_file import BLOCK, ScratchFile, num_block_bytes
from actmem.runtime.swap.tier import Mark

_MIN_SLAB, _MAX_SLAB = 2**20, 2**28
_MAX_THREADS = 4  # each way; a thread is one request in the disk's queue


class Executor(Protocol):
    """Runs work at some other time."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Run `work(*arguments)`."""


class DiskTier:
    """Storages of the CPU in a scratch file in `directory`, at most `limit` bytes of it. Raises `OSError`.

    `writer` and `reader` run the copies; by default a few threads each.
    """

    name: Tier = "disk"

    def __init__(
        self,
        directory: Path,
        limit: int | None,
        counters: SwapCounters,
        *,
        writer: Executor | None = None,
        reader: Executor | None = None,
    ) -> None:
        self.is_open = True
        self.file = ScratchFile(directory)
        self.counters = counters
        num_threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 4))
        self.writer = writer or ThreadPoolExecutor(num_threads, "actmem-write")
        self.reader = reader or ThreadPoolExecutor(num_threads, "actmem-read")
        self.writing = BusyTime()
        self.reading = BusyTime()
        self._orphans: deque[tuple[Future[None], Tensor]] = deque()
        self._ranges = RangeAllocator(
            self.file.grow, granularity=BLOCK, limit=limit, min_slab=_MIN_SLAB, max_slab=_MAX_SLAB
        )

    def offload(self, data: Tensor) -> DiskCopy | None:
        """Start writing `data`."""
        ranges = self.reserve(data)
        return None if ranges is None else DiskCopy(self, data, ranges)

    def reserve(self, data: Tensor) -> tuple[Range, ...] | None:
        """Room in the file for `data`, for a `DiskCopy`; ``None`` where there is too little."""
        self._let_orphans_go()
        return self._ranges.allocate(num_block_bytes(data.data_ptr(), data.numel()))

    def usage(self) -> RangeAllocator:
        """What of the file is in use."""
        self._let_orphans_go()
        return self._ranges

    def adopt(self, write: Future[None], data: Tensor) -> None:
        """Keep memory that is still written though nobody asks for it any more, so that it is freed by a thread that
        computes, and not by one that writes."""
        self._orphans.append((write, data))

    def _let_orphans_go(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may be faster; others may be adopted meanwhile
            for _ in range(len(self._orphans)):
                write, data = self._orphans.popleft()
                if not write.done():
                    self._orphans.append((write, data))


class DiskCopy:
    """One storage in the file, complete in `data` once `after` has passed."""

    def __init__(self, tier: DiskTier, data: Tensor, ranges: tuple[Range, ...], after: Mark | None = None) -> None:
        self.tier = tier
        self.ranges = ranges
        self._num_bytes = data.numel()
        self._skip = data.data_ptr() % BLOCK
        self._data: Tensor | None = data
        write = functools.partial(tier.file.write, data.data_ptr(), data.numel(), ranges)
        self._write = tier.writer.submit(_write, tier, write, after)
        self._last: Future[None] = self._write

    def has_left(self, calls_since: int) -> bool:
        """Whether all of it is in the file."""
        if not self._write.done():
            return False
        self._data = None
        self._write.result()
        self.tier.counters.copy_out_seconds = self.tier.writing.seconds
        return True

    def withdraw(self) -> bool:
        """Give up a write that has not begun."""
        withdrawn = self._write.cancel()
        if withdrawn:
            self._data = None
        return withdrawn

    def begin_reload(self, empty: Callable[[int], Tensor] | None = None) -> DiskReload:
        """Start reading into memory made now, by `empty` where the plain kind will not do."""
        size = sum(each.num_bytes for each in self.ranges) + BLOCK
        room = torch.empty(size, dtype=torch.uint8) if empty is None else empty(size)
        first_block = -room.data_ptr() % BLOCK
        read = functools.partial(self.tier.file.read, room.data_ptr() + first_block, self.ranges)
        self._last = self.tier.reader.submit(_read, [room], read, self.tier.reading)
        begin = first_block + self._skip
        return DiskReload(self.tier, self._last, room[begin : begin + self._num_bytes])

    @property
    def place(self) -> str:
        """The file's directory and the first offset."""
        return f"the scratch file in {self.tier.file.directory}, offset {self.ranges[0].start}"

    def __del__(self) -> None:
        if not hasattr(self, "_last"):
            return
        if not self.withdraw() and self._data is not None and not self._write.done():
            self.tier.adopt(self._write, self._data)
        ranges, allocator = self.ranges, self.tier.usage()
        self._last.add_done_callback(lambda future: allocator.free(ranges))


class DiskReload:
    """A storage on its way back from the file."""

    def __init__(self, tier: DiskTier, read: Future[None], data: Tensor) -> None:
        self._tier = tier
        self._read = read
        self._data = data

    def finish(self) -> Tensor:
        """The bytes; waits for them."""
        self._read.result()
        self._tier.counters.copy_in_seconds = self._tier.reading.seconds
        return self._data

    def is_there(self) -> bool:
        """Whether they have been read."""
        return self._read.done()


class BusyTime:
    """Seconds in which at least one of several threads was at work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._num_working = 0
        self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_working:
                self._since = time.perf_counter()
            self._num_working += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_working -= 1
            if not self._num_working:
                self.seconds += time.perf_counter() - self._since


def _write(tier: DiskTier, move: Callable[[], None], after: Mark | None) -> None:
    """Write memory that the copy keeps meanwhile, or the tier, which this keeps, if the copy is gone."""
    if after is not None:
        after.synchronize()
    with tier.writing:
        move()


def _read(room: list[Tensor], move: Callable[[], None], busy: BusyTime) -> None:
    """Fill memory that must not go meanwhile: `room` holds it, and lets it go before the work counts as done, so that
    it is freed by the thread that computes."""
    try:
        with busy:
            move()
    finally:
        room.clear()
