"""The disk tier of an accelerator: host memory stands between the device and the file.

Out: a stream copies to a pinned buffer, then a thread writes it. Back: a thread reads into one, and a stream copies it
to memory that the device allocated when the reload began. The buffers are there for as long as a copy takes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from actmem.planning.plan import Tier
from actmem.runtime.swap.disk import DiskCopy, DiskReload, DiskTier
from actmem.runtime.swap.ranges import RangeAllocator
from actmem.runtime.swap.tier import CopyEngine, Mark


class StagedTier:
    """Storages of `engine`'s device in the file of `disk`."""

    name: Tier = "disk"

    def __init__(self, engine: CopyEngine, disk: DiskTier) -> None:
        self.is_open = True
        self.engine = engine
        self.disk = disk
        self.sender = ThreadPoolExecutor(1, "actmem-send")

    def offload(self, data: Tensor) -> StagedCopy | None:
        """Start copying `data` to a buffer, and from there to the file."""
        buffer = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=data.device.type != "cpu")
        mark = self.engine.offload([(buffer, data)], [self.engine.now()])
        copy = self.disk.offload(buffer, after=mark)
        return None if copy is None else StagedCopy(self, copy, data, mark)

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
        sent = self.tier.sender.submit(_send, engine, self._copy.begin_reload(), target, engine.now())
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
        self._target = target

    def finish(self) -> Tensor:
        """The bytes; the host waits for the file, the current stream for the copy."""
        self._engine.wait(self._sent.result())
        return self._target

    def is_there(self) -> bool:
        """Whether they have come."""
        return self._sent.done() and self._sent.result().has_passed()

    def __del__(self) -> None:
        if hasattr(self, "_sent") and self._sent.exception() is None:
            self._sent.result().wait()


def _send(engine: CopyEngine, read: DiskReload, target: Tensor, now: Mark) -> Mark:
    return engine.reload([(target, read.finish())], [now])
