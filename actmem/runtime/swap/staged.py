"""The disk tier of an accelerator: host memory stands between the device and the file.

Out: a stream copies to a pinned buffer, then a thread writes it. Back: a thread reads into one, and a stream copies it
to memory that the device allocated when the reload began. The buffers are there for as long as a copy takes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from actmem.planning.plan import Tier
from actmem.runtime.swap.disk import DiskCopy, DiskReload, DiskTier
from actmem.runtime.swap.host import HostMemory, first_line
from actmem.runtime.swap.ranges import RangeAllocator
from actmem.runtime.swap.tier import CopyEngine, Mark


class StagedTier:
    """Storages of `engine`'s device in the file of `disk`."""

    name: Tier = "disk"

    def __init__(self, engine: CopyEngine, disk: DiskTier, *, pinned: bool = True) -> None:
        self.is_open = True
        self.engine = engine
        self.disk = disk
        self.memory = HostMemory(pinned=pinned)
        self.sender = ThreadPoolExecutor(1, "actmem-send")

    def offload(self, data: Tensor) -> StagedCopy | None:
        """Start copying `data` to a buffer, and from there to the file."""
        try:
            buffer = self.memory.empty(data.numel())
        except RuntimeError as error:
            raise OSError(f"no host memory: {first_line(error)}") from error
        ranges = self.disk.reserve(buffer)
        if ranges is None:
            return None
        mark = self.engine.offload([(buffer, data)], [self.engine.now()])
        return StagedCopy(self, DiskCopy(self.disk, buffer, ranges, mark), data, mark)

    def usage(self) -> RangeAllocator:
        """What of the file is in use."""
        return self.disk.usage()


class StagedCopy:
    """One storage in the file."""

    def __init__(self, tier: StagedTier, copy: DiskCopy, data: Tensor, mark: Mark) -> None:
        self.tier = tier
        self._copy = copy
        self._device = data.device
        self._num_bytes = data.numel()
        self._mark = mark
        self._data: Tensor | None = data

    def has_left(self, calls_since: int) -> bool:
        """Whether all of it is in the file."""
        if not self._copy.has_left(calls_since):
            return False
        self._data = None
        return True

    def withdraw(self) -> bool:
        """Give up a write that has not begun."""
        return self._copy.withdraw()

    def begin_reload(self) -> StagedReload:
        """Start reading, and sending on what has been read, to memory that the current stream allocates now."""
        target = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        engine = self.tier.engine
        read = self._copy.begin_reload(self.tier.memory.empty)
        sent = self.tier.sender.submit(_send, engine, read, target, engine.now())
        return StagedReload(engine, sent, target)

    @property
    def place(self) -> str:
        """Where in the file it is."""
        return self._copy.place

    def __del__(self) -> None:
        if getattr(self, "_data", None) is not None:
            self._mark.wait()  # the device's memory is free for others after the copy only


class StagedReload:
    """A storage on its way back from the file."""

    def __init__(self, engine: CopyEngine, sent: Future[Mark], target: Tensor) -> None:
        self._engine = engine
        self._sent = sent
        self._target: Tensor | None = target

    def finish(self) -> Tensor:
        """The bytes; the host waits for the file, the current stream for the copy."""
        assert self._target is not None, "a reload is finished once"
        self._engine.wait(self._sent.result())
        target, self._target = self._target, None
        return target

    def is_there(self) -> bool:
        """Whether they have come, or will not."""
        return self._sent.done() and (self._sent.exception() is not None or self._sent.result().has_passed())

    def __del__(self) -> None:
        if self._target is None or self._sent.cancel():
            return
        # The device's memory is free for others after the copy only. A finalizer must not wait for the copy to begin.
        if not self._sent.done():
            self._sent.add_done_callback(partial(_hold_until_copied, self._target))
        elif self._sent.exception() is None:
            self._sent.result().wait()


def _hold_until_copied(target: Tensor, sent: Future[Mark]) -> None:
    if sent.exception() is None:
        sent.result().synchronize()


def _send(engine: CopyEngine, read: DiskReload, target: Tensor, now: Mark) -> Mark:
    return engine.reload([(target, read.finish())], [now])
