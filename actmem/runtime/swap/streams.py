"""Copies between an accelerator and host memory, on streams of their own, one each way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmem.runtime.swap.tier import Mark


class StreamEngine:
    """Copies of one device. The host waits for none of them: order is a matter of events between streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.Stream(device)
        self._inward = torch.Stream(device)

    def now(self) -> StreamMark:
        """Where the current stream stands."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return StreamMark(self._device, event, event)

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> StreamMark:
        """Copy the second of each pair to the first once all marks `after` have passed."""
        return self._copy(pairs, after, self._outward)

    def reload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> StreamMark:
        """The same towards the device."""
        return self._copy(pairs, after, self._inward)

    def wait(self, mark: Mark) -> StreamMark:
        """Let the current stream wait for `mark`; the seconds of what comes back are those that it waited."""
        begun, done = self._events()
        begun.record(torch.accelerator.current_stream(self._device))
        mark.wait()
        done.record(torch.accelerator.current_stream(self._device))
        return StreamMark(self._device, begun, done)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark], stream: torch.Stream) -> StreamMark:
        begun, done = self._events()
        with _again(stream):
            for mark in after:
                mark.wait()
            begun.record(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(stream)
        return StreamMark(self._device, begun, done)

    def _events(self) -> tuple[torch.Event, torch.Event]:
        return torch.Event(self._device, enable_timing=True), torch.Event(self._device, enable_timing=True)


def _again(stream: torch.Stream) -> torch.Stream:
    """The same stream in an object of its own: one object cannot be entered by two threads at once."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class StreamMark:
    """What lies between two events of a stream; it has passed when the second has."""

    def __init__(self, device: torch.device, begun: torch.Event, done: torch.Event) -> None:
        self._device = device
        self._begun = begun
        self._done = done

    def wait(self) -> None:
        """Whatever the current stream does from now on comes after it."""
        torch.accelerator.current_stream(self._device).wait_event(self._done)

    def has_passed(self) -> bool:
        """Whether the stream is past it."""
        return bool(self._done.query())

    def synchronize(self) -> None:
        """Let the host wait until it is."""
        self._done.synchronize()

    def seconds(self) -> float | None:
        """How long the stream took for it; ``None`` while it runs."""
        return self._begun.elapsed_time(self._done) / 1e3 if self.has_passed() else None
