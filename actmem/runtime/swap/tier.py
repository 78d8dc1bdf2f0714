"""What a tier is: a place for a storage's bytes away from the device, and how they get there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actmem.planning.plan import Tier


class SwapWarning(UserWarning):
    """Something that should have been swapped stays on the device, or swaps at more cost than it must."""


class Copy(Protocol):
    """One storage's bytes in `tier`. When the last reference to it goes, its place is free again."""

    @property
    def tier(self) -> SwapTier:
        """Where it is."""

    def has_left(self, calls_since: int) -> bool:
        """Whether the original may be let go, `calls_since` region calls after the copy was asked for.

        Raises `OSError` if the copy failed; the original is then all there is.
        """

    def withdraw(self) -> bool:
        """Give the copy up if it has not begun; whether that worked."""

    def begin_reload(self) -> Reload:
        """Start copying back, into memory allocated now. May be asked again once the last reload has finished."""

    @property
    def place(self) -> str:
        """Where the bytes are, for messages."""


class Reload(Protocol):
    """Bytes on their way back."""

    def finish(self) -> Tensor:
        """The bytes, as a `uint8` tensor whose users may run now; waits if need be. Raises `OSError`."""

    def is_there(self) -> bool:
        """Whether `finish` would not wait."""


class SwapTier(Protocol):
    """A place for bytes."""

    name: Tier
    is_open: bool

    def offload(self, data: Tensor) -> Copy | None:
        """Start copying `data`, all bytes of a storage as `uint8`; ``None`` where there is no room.

        Whoever calls keeps `data` until the copy `has_left`. Raises `OSError` if the tier fails.
        """

    def usage(self) -> TierUsage:
        """What of it is and was in use."""


class TierUsage(Protocol):
    """A `RangeAllocator`'s figures."""

    used_bytes: int
    reserved_bytes: int
    high_water_bytes: int
    num_hits: int
    num_growths: int


class Mark(Protocol):
    """A point that copies reach."""

    def wait(self) -> None:
        """Whatever the current stream does from now on comes after this point."""

    def has_passed(self) -> bool:
        """Whether the point has been reached."""

    def synchronize(self) -> None:
        """Let the host wait until it has."""

    def seconds(self) -> float | None:
        """How long the copies before it took; ``None`` until that is known."""


class CopyEngine(Protocol):
    """Copies between the device and host memory beside the work of the current stream, in the order they came each way.

    Whoever asks for a copy keeps the device's memory until the copy's mark has passed, or the current stream waits for
    it. The host's may go at once: torch keeps what is pinned until its copies have run, and waits for other copies.
    """

    def now(self) -> Mark:
        """Where the current stream stands."""

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> Mark:
        """Copy the second of each pair to the first once all marks `after` have passed."""

    def reload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> Mark:
        """The same towards the device."""

    def wait(self, mark: Mark) -> Mark:
        """Let the current stream wait for `mark`; the seconds of what comes back are those that it waited."""
