"""Copies whose order is drawn from a seed: they stand in for threads and streams, and run late or out of order.

`SeededExecutor` does a thread pool's work and `SeededEngine` a device's copies, both on the thread that asks, at
moments that a `Schedule` picks: some time later, or when somebody waits. Whatever may go wrong between threads or
streams then goes wrong here, and again with the same seed.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from actmem._compat import dispatch_off
from actmem.planning.plan import Tier
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.disk import DiskTier
from actmem.runtime.swap.host import HostTier, SlabPool
from actmem.runtime.swap.staged import StagedTier
from actmem.runtime.swap.swapper import Swapper
from actmem.runtime.swap.tier import Mark, SwapTier

MIB = 2**20
KINDS = ("disk", "host", "staged")


class Schedule:
    """What is pending, and a random source that says how much of it runs when somebody looks.

    `laziness`: how likely nothing does. `num_overlapped` counts copies asked for while others were pending.
    """

    def __init__(self, seed: int, laziness: float = 0.6) -> None:
        self.random = random.Random(seed)
        self.laziness = laziness
        self.num_asked = 0
        self.num_overlapped = 0
        self.faults: list[str] = []
        self._runners: list[Callable[[], bool]] = []
        self._is_running = False

    def add(self, run_one: Callable[[], bool]) -> None:
        """Somebody has work; `run_one` does a piece of it and says whether there was any."""
        self._runners.append(run_one)

    def ask(self, others_pending: int) -> None:
        """A copy is asked for."""
        self.num_asked += 1
        self.num_overlapped += others_pending > 0

    def look(self) -> None:
        """Time passes: a random number of pieces of work are done."""
        if self._is_running or self.random.random() < self.laziness:
            return
        self._is_running = True
        try:
            for _ in range(self.random.randint(1, 4)):
                self.random.choice(self._runners)()
        finally:
            self._is_running = False

    def run_all(self) -> None:
        """Do all that is pending."""
        while sum(run_one() for run_one in self._runners):
            pass


class SeededFuture(Future[Any]):
    """Done when its executor has got round to it, or when somebody wants the result."""

    def __init__(self, executor: SeededExecutor, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.executor = executor
        self.work: Callable[..., Any] | None = work
        self.arguments = arguments

    def done(self) -> bool:
        self.executor.schedule.look()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self.executor.run(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.executor.run(self)
        return super().exception(0)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and self in self.executor.pending:
            self.executor.pending.remove(self)
            self.work, self.arguments = None, ()
        return cancelled


class SeededExecutor:
    """Work in any order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.pending: list[SeededFuture] = []
        schedule.add(self._run_any)

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        self.schedule.ask(len(self.pending))
        future = SeededFuture(self, work, arguments)
        self.pending.append(future)
        self.schedule.look()
        return future

    def run(self, future: SeededFuture) -> None:
        """Do this work now, unless it has been done."""
        if future not in self.pending:
            return
        self.pending.remove(future)
        work, arguments = future.work, future.arguments
        future.work, future.arguments = None, ()
        assert work is not None and future.set_running_or_notify_cancel()
        try:
            result = work(*arguments)
        except Exception as error:  # noqa: BLE001 - a future hands on whatever it was
            del arguments
            future.set_exception(error)
        else:
            del arguments
            future.set_result(result)

    def _run_any(self) -> bool:
        if not self.pending:
            return False
        self.run(self.schedule.random.choice(self.pending))
        return True


class Place:
    """A tensor's memory, not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)
        self._total = storage.nbytes()
        self._begin, self._num_bytes = int(tensor.storage_offset()), tensor.numel()
        assert tensor.dtype is torch.uint8 and tensor.is_contiguous()

    def open(self) -> Tensor | None:
        """The tensor again; ``None`` if its memory was freed or resized."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None or storage.nbytes() != self._total:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._begin, (self._num_bytes,), (1,))


class SeededMark:
    """The end of a copy."""

    def __init__(self, queue: CopyQueue | None) -> None:
        self._queue = queue

    def wait(self) -> None:
        if self._queue is not None:
            self._queue.run_to(self)

    def synchronize(self) -> None:
        self.wait()

    def has_passed(self) -> bool:
        if self._queue is not None:
            self._queue.schedule.look()
        return self._queue is None

    def seconds(self) -> float | None:
        return None if self._queue is not None else 1e-3

    def reached(self) -> None:
        """The copy has been carried out."""
        self._queue = None


PASSED = SeededMark(None)


class PendingCopy:
    """Pairs of targets and sources, `host` the side that the engine keeps alive, and what must come first."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark], mark: SeededMark, out: bool):
        self.places = [(Place(target), Place(source)) for target, source in pairs]
        self.host = [pair[not out] for pair in pairs]
        self.after = list(after)
        self.mark = mark


class CopyQueue:
    """Copies of one direction, carried out in the order they came."""

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.schedule = schedule
        self.name = name
        self.pending: deque[PendingCopy] = deque()
        schedule.add(self.run_one)

    def run_to(self, mark: SeededMark) -> None:
        """Carry out everything up to `mark`, and no more."""
        while not (mark is PASSED or mark._queue is None):
            assert self.run_one(), "a mark stands behind a copy that is not there"

    def run_one(self) -> bool:
        """Carry out the next copy, and before it whatever it has to come after."""
        if not self.pending:
            return False
        copy = self.pending.popleft()
        for mark in copy.after:
            mark.wait()
            if isinstance(mark, SeededMark) and mark._queue is not None:
                self.schedule.faults.append(f"{self.name}: a copy went before what it has to come after")
        with dispatch_off(), torch.no_grad():
            for to, of in copy.places:
                target, source = to.open(), of.open()
                if target is None or source is None:
                    freed = "target" if target is None else "source"
                    self.schedule.faults.append(f"{self.name}: the {freed} was freed before its copy ran")
                else:
                    target.copy_(source)
        copy.mark.reached()
        return True


class SeededEngine:
    """A device's two copy streams. Memory that a copy will fill holds 0xFF until it has run, which no float is."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.outward = CopyQueue(schedule, "out")
        self.inward = CopyQueue(schedule, "in")

    def now(self) -> SeededMark:
        return PASSED

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> SeededMark:
        return self._ask(self.outward, pairs, after)

    def reload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> SeededMark:
        return self._ask(self.inward, pairs, after)

    def wait(self, mark: Mark) -> SeededMark:
        mark.wait()
        return PASSED

    def _ask(self, queue: CopyQueue, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> SeededMark:
        self.schedule.ask(len(self.outward.pending) + len(self.inward.pending))
        mark = SeededMark(queue)
        if queue is self.inward or all(each._queue is None for each in after if isinstance(each, SeededMark)):
            with dispatch_off(), torch.no_grad():
                for target, _ in pairs:
                    target.fill_(0xFF)
        queue.pending.append(PendingCopy(pairs, after, mark, queue is self.outward))
        self.schedule.look()
        return mark


def seeded_tier(
    kind: str, schedule: Schedule, directory: Path, counters: SwapCounters, *, limit: int | None = None
) -> SwapTier:
    """A ``disk``, ``host`` or ``staged`` tier whose copies run as the schedule says."""
    if kind == "host":
        return HostTier(SeededEngine(schedule), SlabPool(limit, pinned=False), counters)
    disk = DiskTier(directory, limit, counters, writer=SeededExecutor(schedule), reader=SeededExecutor(schedule))
    if kind == "disk":
        return disk
    staged = StagedTier(SeededEngine(schedule), disk, pinned=False)
    staged.sender = SeededExecutor(schedule)  # type: ignore[assignment]
    return staged


def seeded_swapper(
    kinds: Sequence[str],
    schedule: Schedule,
    directory: Path,
    *,
    prefetch: int = 1,
    min_swap_bytes: int = 0,
    in_flight_limit: int = 2**31,
    limit: int | None = None,
) -> Swapper:
    """A swapper that fills such tiers in this order."""
    counters = SwapCounters()
    tiers = [seeded_tier(kind, schedule, directory, counters, limit=limit) for kind in kinds]
    usual: list[Tier] = [tier.name for tier in tiers]
    return Swapper(
        tiers, usual, counters, prefetch=prefetch, min_swap_bytes=min_swap_bytes, in_flight_limit=in_flight_limit
    )


def let_apply_use(swapper: Swapper, patch: pytest.MonkeyPatch) -> None:
    """Plans applied from now on swap with `swapper`, whatever their settings say."""
    patch.setattr(sys.modules["actmem.runtime.apply"], "build_swapper", lambda *_: swapper)
