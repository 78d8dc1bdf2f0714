"""The swapper: what may leave now, what is on its way, and what comes back ahead of use.

All decisions are made on the thread that computes: when a region is entered or left, when a tensor is packed and when
one is unpacked. Copies run beside it, on streams or threads, and are only looked at there.

Bounds. At most `in_flight_limit` bytes are on their way out; what comes meanwhile is saved instead, for that is no
worse, and waiting would be. Reloads run ahead of the backward pass by `prefetch` regions, and by as many bytes.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem._compat import count_versions_together, dispatch_off, storage_id
from actmem.errors import SwapError
from actmem.planning.plan import Tier
from actmem.runtime.digest import digest_of
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.storage import SwapOrder, SwappedStorage, SwappedView, bytes_of, can_be_swapped
from actmem.runtime.swap.tier import Copy, SwapTier, SwapWarning

_MOMENT_S = 1e-3
_FORKED = (
    "the process was forked after the plan was applied, and the tiers belong to its parent; nothing is swapped here: "
    "apply the plan in the new process, or fork before"
)


class _Leaving(NamedTuple):
    storage: weakref.ref[SwappedStorage]
    num_bytes: int
    call: int


class CallSwaps:
    """The swapped storages of one region call, in the order they left, and the ids of those that had to stay. Calls are
    numbered as they come. Those of one `group` run their backward passes one after the other."""

    __slots__ = ("__weakref__", "group", "number", "refused", "region", "storages", "swapper")

    def __init__(self, swapper: Swapper, region: str, number: int, group: Hashable) -> None:
        self.swapper = swapper
        self.region = region
        self.number = number
        self.group = group
        self.storages: list[weakref.ref[SwappedStorage]] = []
        self.refused: set[int] = set()


class Swapper:
    """Moves storages of `device` to `tiers` and back. A rule without a tier takes the first of `usual` with room."""

    def __init__(
        self,
        tiers: Sequence[SwapTier],
        usual: Sequence[Tier],
        counters: SwapCounters,
        *,
        prefetch: int,
        min_swap_bytes: int,
        in_flight_limit: int,
        device: torch.device | None = None,
    ) -> None:
        self.min_swap_bytes = min_swap_bytes
        self._device = device or torch.device("cpu")
        self._tiers = {tier.name: tier for tier in tiers}
        self._usual = tuple(usual)
        self._counters = counters
        self._prefetch = prefetch
        self._in_flight_limit = in_flight_limit
        self._lock = threading.RLock()
        self._known: WeakValueDictionary[int, SwappedStorage] = WeakValueDictionary()
        self._leaving: dict[Tier, deque[_Leaving]] = {name: deque() for name in self._tiers}
        self._leaving_bytes = 0
        self._num_calls = 0
        self._calls: WeakValueDictionary[int, CallSwaps] = WeakValueDictionary()
        self._reached: weakref.ref[CallSwaps] | None = None
        self._wanted: deque[weakref.ref[SwappedStorage]] = deque()
        self._coming: list[weakref.ref[SwappedStorage]] = []
        self._said: set[str] = set()
        self._pid = os.getpid()
        self._group: Hashable = None
        self._swaps_here = True

    @property
    def counters(self) -> SwapCounters:
        """The counts as they stand now."""
        counters = self._counters.copy()
        for name, tier in self._tiers.items():
            usage = tier.usage()
            counters.pool_hits += usage.num_hits
            counters.pool_growths += usage.num_growths
            setattr(counters, f"{name}_high_water_bytes", usage.high_water_bytes)
        return counters

    def wait_until_empty(self, seconds: float) -> None:
        """Wait until no place is taken, by a copy that still runs or by what is away, but no longer than `seconds`."""
        until = time.monotonic() + seconds
        while any(tier.usage().used_bytes for tier in self._tiers.values()) and time.monotonic() < until:
            time.sleep(_MOMENT_S)
        for tier in self._tiers.values():
            tier.usage()  # lets go of what had to be kept for its copy

    def enter_group(self, group: Hashable, *, swaps: bool = True) -> None:
        """Calls from now on belong to `group`; without `swaps`, what they save stays."""
        self._group, self._swaps_here = group, swaps

    def expect(self, group: Hashable) -> None:
        """The backward passes of a group are near: start the way back of what its last calls have away."""
        with self._lock, dispatch_off():
            self._settle()
            last = sorted((each for each in self._calls.values() if each.group == group), key=lambda each: -each.number)
            for call in last[: self._prefetch + 1]:
                self._wanted.extend(reversed(call.storages))
            self._prefetch_more()

    def begin_call(self, region: str) -> CallSwaps:
        """A region is entered."""
        with self._lock:
            self._num_calls += 1
            self._settle()
            call = self._calls[self._num_calls] = CallSwaps(self, region, self._num_calls, self._group)
            return call

    def end_call(self) -> None:
        """A region is left."""
        with self._lock:
            self._settle()

    def swap(self, tensor: Tensor, order: SwapOrder, call: CallSwaps, *, verify: bool) -> SwappedView | None:
        """Let the storage behind `tensor` leave; ``None`` where it has to stay."""
        with self._lock, dispatch_off():
            if os.getpid() != self._pid:
                self._say(_FORKED)
                return None
            if tensor.device != self._device or not can_be_swapped(tensor):
                self._note_unfit(tensor)
                return None
            storage = self.find(tensor)
            if storage is None and self._swaps_here and storage_id(tensor) not in call.refused:
                storage = self._offload(tensor, order, call, verify)
            if storage is None:
                call.refused.add(storage_id(tensor))
                return None
            return SwappedView.of(tensor, storage)

    def find(self, tensor: Tensor) -> SwappedStorage | None:
        """The swapped storage that `tensor` looks into, with the contents it has now."""
        storage = self._known.get(storage_id(tensor))
        if storage is None or storage.version != tensor._version:
            return None
        assert isinstance(storage.witness, Tensor), "only plain tensors are swapped"
        return storage if count_versions_together(storage.witness, tensor) else None

    def take(self, view: SwappedView) -> Tensor:
        """The tensor, for one use of it; waits for what is not there yet. Raises `SwapError`."""
        storage = view.storage
        with self._lock, dispatch_off():
            self._settle()
            tensor = view.look_into(self._bring(storage))
            storage.done += 1
            if storage.done >= storage.uses:
                self._let_go(storage)
            if self._wanted:
                self._prefetch_more()
            return tensor

    def keep_contents(self, storage: SwappedStorage) -> None:
        """The memory it lay in is about to be overwritten: what is not confirmed to be away is copied here."""
        with self._lock, dispatch_off():
            self._settle()
            if storage.data is None or storage_id(storage.data) != storage.identity:
                return
            if storage.has_copy:
                storage.data = None
            else:
                storage.data = storage.data.clone()
                storage.copy = None

    def reach(self, call: CallSwaps) -> None:
        """The backward pass asks for something of `call`."""
        if self._reached is not None and self._reached() is call:
            return
        with self._lock, dispatch_off():
            self._reached = weakref.ref(call)
            self._wanted.clear()
            earlier = sorted(
                number for number, each in self._calls.items() if number < call.number and each.group == call.group
            )
            for ahead in (call, *(self._calls.get(number) for number in earlier[::-1][: self._prefetch])):
                if ahead is not None:
                    self._wanted.extend(reversed(ahead.storages))
            self._prefetch_more()
            self._settle()

    def _prefetch_more(self) -> None:
        """Start reloads of what is wanted, in backward order, as far as the limit of bytes lets them."""
        here = [storage for reference in self._coming if (storage := reference()) is not None and storage.reload]
        self._coming = [weakref.ref(storage) for storage in here]
        coming = sum(storage.num_bytes for storage in here)
        while self._wanted:
            storage = self._wanted[0]()
            if storage is not None:
                is_away = storage.data is None and storage.reload is None
                if is_away and coming + storage.num_bytes > self._in_flight_limit:
                    return
                coming += storage.num_bytes if self._want(storage) else 0
            self._wanted.popleft()

    def _offload(self, tensor: Tensor, order: SwapOrder, call: CallSwaps, verify: bool) -> SwappedStorage | None:
        data = bytes_of(tensor)
        self._settle()
        if self._leaving_bytes + data.numel() > self._in_flight_limit:
            self._counters.num_refused += 1
            self._counters.bytes_refused += data.numel()
            return None
        copy = self._copy_to_a_tier(data, order)
        if copy is None:
            self._counters.num_no_room += 1
            self._counters.bytes_no_room += data.numel()
            return None
        self._counters.num_begun += 1
        storage = SwappedStorage(tensor, data, copy, call.region, order.path)
        if verify:
            storage.digest = digest_of(data)
        self._known[storage_id(tensor)] = storage
        self._leaving[copy.tier.name].append(_Leaving(weakref.ref(storage), data.numel(), self._num_calls))
        self._leaving_bytes += data.numel()
        call.storages.append(weakref.ref(storage))
        return storage

    def _note_unfit(self, tensor: Tensor) -> None:
        self._counters.num_unfit += 1
        if tensor.device != self._device or type(tensor) not in (Tensor, Parameter):
            self._say(
                f"what is a {type(tensor).__name__} on {tensor.device} stays there: only plain tensors on "
                f"{self._device} are swapped; save it in the plan"
            )

    def _copy_to_a_tier(self, data: Tensor, order: SwapOrder) -> Copy | None:
        names = self._usual if order.tier is None else (order.tier,)
        tiers = [self._tiers[name] for name in names if name in self._tiers and self._tiers[name].is_open]
        for tier in tiers:
            try:
                copy = tier.offload(data)
            except OSError as error:
                self._close(tier, error)
                continue
            if copy is not None:
                return copy
        if any(tier.is_open for tier in tiers):
            self._say(
                f"no room is left in {' or '.join(names)}, so what finds none stays on the device: raise "
                f"{' or '.join(f'memory.{name}_limit' for name in names)}, or swap less"
            )
        return None

    def _settle(self) -> None:
        """Let go of what has left; a tier's copies are looked at in the order they came."""
        for leaving in self._leaving.values():
            while leaving:
                head = leaving[0]
                storage = head.storage()
                if storage is not None and not self._has_left(storage, self._num_calls - head.call):
                    break
                leaving.popleft()
                self._leaving_bytes -= head.num_bytes

    def _has_left(self, storage: SwappedStorage, calls_since: int) -> bool:
        """Whether the storage is no longer on its way out: its copy is there, was given up, or has failed."""
        if storage.copy is None:
            return True
        try:
            if not storage.copy.has_left(calls_since):
                return False
        except OSError as error:
            self._close(storage.copy.tier, error)
            self._counters.num_failed += 1
            storage.copy = None
            return True
        storage.has_copy = True
        self._counters.num_out += 1
        self._counters.bytes_out += storage.num_bytes
        if not storage.is_wanted:
            storage.data = None
        return True

    def _want(self, storage: SwappedStorage) -> bool:
        """The backward pass will need this soon; whether a reload was begun for it."""
        storage.is_wanted = True
        if storage.data is None:
            if storage.reload is not None:
                return False
            assert storage.copy is not None
            storage.reload = storage.copy.begin_reload()
            self._coming.append(weakref.ref(storage))
            return True
        if not storage.has_copy and storage.copy is not None and storage.copy.withdraw():
            storage.copy = None
            self._counters.num_withdrawn += 1
        return False

    def _bring(self, storage: SwappedStorage) -> Tensor:
        if storage.data is None and os.getpid() != self._pid:
            raise SwapError(f"{storage.path} of {storage.region} was swapped by the parent of this process: {_FORKED}")
        self._want(storage)
        if storage.data is None:
            assert storage.reload is not None and storage.copy is not None
            self._counters.num_late += not storage.reload.is_there()
            started = time.perf_counter()
            try:
                data = storage.reload.finish()
            except OSError as error:
                raise SwapError(
                    f"{storage.path} of {storage.region} cannot be read back from {storage.copy.place}: {error}; its "
                    "values are lost, so this step cannot go on: check that disk and start again from the last "
                    "checkpoint, or name another directory in memory.disk_path"
                ) from error
            finally:
                storage.reload = None
            self._counters.exposed_seconds += time.perf_counter() - started
            self._counters.num_in += 1
            self._counters.bytes_in += storage.num_bytes
            self._verify(storage, data)
            storage.data = data
        return storage.data

    def _verify(self, storage: SwappedStorage, data: Tensor) -> None:
        if storage.digest is not None and not storage.digest.matches(digest_of(data)):
            assert storage.copy is not None
            raise SwapError(
                f"{storage.path} of {storage.region} came back from {storage.copy.place} with other bytes than it left "
                "with: that memory or disk is not to be trusted, or the value was edited by a kernel that torch cannot "
                "see while it was copied; save it with a rule of action save, or name another directory in "
                "memory.disk_path"
            )

    def _let_go(self, storage: SwappedStorage) -> None:
        storage.done = 0
        storage.is_wanted = False
        if storage.has_copy:
            storage.data = None

    def _close(self, tier: SwapTier, error: OSError) -> None:
        if tier.is_open:
            tier.is_open = False
            self._say(
                f"the swap tier {tier.name} is closed, and what would go there stays on the device: {error}; training "
                "goes on, with more memory; to swap again, mend that and start anew"
            )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, SwapWarning, stacklevel=2)
