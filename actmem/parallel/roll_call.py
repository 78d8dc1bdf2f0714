"""Which process the others wait for in vain: asked of all of them once one has waited too long.

What a library says of an operation that ran into its timeout names neither the operation nor the rank that was missing.
So the process that gave up asks through the store, which does not depend on the ranks, and a thread of every process
answers with where its main thread stands. One that was stopped, or is gone, answers nothing.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from actmem._compat import stack_of, store_connection
from actmem.errors import RankError

_PACKAGE = Path(__file__).parents[1]
_FOREVER = timedelta(days=365)
_PATIENCE_S = 5.0
# Gloo raises plain RuntimeErrors.
_BROKEN_OFF = re.compile(r"gloo|pair closure|closed by peer|reset by peer|broken pipe|timed out waiting", re.IGNORECASE)


class RollCall:
    """One process's part in it: while entered, it answers."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._ears, self._voice = store_connection("roll call"), store_connection("roll call")
        self._main = threading.get_ident()
        self._gave_up: str | None = None
        self._thread = threading.Thread(target=self._answer, name="roll call", daemon=True)

    def __enter__(self) -> RollCall:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(RuntimeError):  # the store may have gone before this process; then nobody waits for it
            self._voice.set(_asked(self._rank), "")
        self._thread.join()

    def _answer(self) -> None:
        """Wait to be asked, then say where the main thread is."""
        with suppress(RuntimeError):
            self._ears.wait([_asked(self._rank)], _FOREVER)
            self._say(self._ears)

    def ask(self, error: BaseException) -> str:
        """Where each process stands, a line for each; this one stands where `error` was raised."""
        self._gave_up = f"gave up in {_place(traceback.extract_tb(error.__traceback__))}"
        try:
            self._say(self._voice)
            for rank in range(self._size):
                self._voice.set(_asked(rank), "")
            return "\n".join(f"  rank {rank} {self._heard(rank)}" for rank in range(self._size))
        except RuntimeError:  # the store has gone, with whoever kept it
            return f"  rank {self._rank} {self._gave_up}; the others can no longer be asked"

    def _say(self, store: Any) -> None:
        stack = stack_of(self._main)
        store.set(_answer(self._rank), self._gave_up or f"is in {_place(stack)}")

    def _heard(self, rank: int) -> str:
        end = time.monotonic() + _PATIENCE_S
        while not self._voice.check([_answer(rank)]):
            if time.monotonic() > end:
                return "does not answer: it was stopped, or is gone"
            time.sleep(0.05)
        return str(self._voice.get(_answer(rank)).decode())


@contextmanager
def called(rank: int, size: int) -> Iterator[None]:
    """A process among others: where one of them does not come, the error says which, and where all of them stand.

    Raises `RankError` in place of what torch raises for an operation between processes that timed out or broke off.
    """
    with RollCall(rank, size) as call:
        try:
            yield
        except RuntimeError as error:
            if not _is_broken_off(error):
                raise
            raise RankError(
                f"an operation between processes came to no end ({first_line(error)}):\n{call.ask(error)}\n"
                "  run again to go on from the last checkpoint, or from the beginning where there is none; where "
                "something takes longer, such as a step or the search for a plan, raise parallel.timeout_seconds"
            ) from error


def _asked(rank: int) -> str:
    return f"asked/{rank}"


def _answer(rank: int) -> str:
    return f"answer/{rank}"


def _is_broken_off(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, DistError) or _BROKEN_OFF.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the place in its source that it begins with."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0])


def _place(stack: traceback.StackSummary) -> str:
    """The innermost call, and from where in this package it came."""
    own = [frame for frame in stack if _PACKAGE in Path(frame.filename).parents]
    if not own:
        return stack[-1].name
    where = f"{Path(own[-1].filename).relative_to(_PACKAGE.parent)}:{own[-1].lineno}"
    return (
        f"{own[-1].name} ({where})" if stack[-1] is own[-1] else f"{stack[-1].name}, called by {own[-1].name} ({where})"
    )
