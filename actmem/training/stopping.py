"""Ctrl-C and SIGTERM as a wish to stop: the step in hand is finished and saved, and a second signal stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"\nStopping after this step; once more stops at once, without saving.\n"


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is noted in `signal_number` instead of ending the process.

    From then on a second one does what it did before, and stops the process where it was ignored before (as in the
    background of a script). When the block ends all handlers are as they were. Outside the main thread, where Python
    allows no handlers, nothing is caught. `is_told`: the first signal is answered on standard error.
    """

    def __init__(self, *, is_told: bool = True) -> None:
        self.signal_number: int | None = None
        self._is_told = is_told
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_number = number
        for each, handler in self._previous.items():
            signal.signal(each, _stopping(each) if handler in (signal.SIG_IGN, None) else handler)
        if self._is_told:
            os.write(2, _NOTICE)  # print may be what the signal interrupted

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}


def _stopping(number: signal.Signals) -> Any:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
