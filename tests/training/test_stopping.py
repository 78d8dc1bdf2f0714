from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from actmem.training.stopping import StopRequest
from actmem.training.trainer import _Trainer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        assert not stop.wanted
        os.kill(os.getpid(), number)
        assert stop.wanted
    assert stop.signal_number == number
    assert "Stopping after this step" in capfd.readouterr().err


def test_only_one_of_many_processes_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(is_told=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wanted
    assert capfd.readouterr().err == ""


def test_the_second_stops_at_once() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_the_second_stops_even_where_the_first_would_have_been_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_as_they_were_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_ranks_stop_by_what_they_told_each_other_and_not_by_what_they_know() -> None:
    """A signal that comes just after they asked each other stops none of them, for the others do not know of it."""

    class Late(StopRequest):
        looks = 0

        @property
        def signal_number(self) -> int | None:  # type: ignore[override]
            self.looks += 1
            return signal.SIGTERM if self.looks > 1 else None

        @signal_number.setter
        def signal_number(self, number: int | None) -> None:
            pass

    class Two:
        def gather(self, said: object) -> list[object]:
            return [said, None]

    trainer, stop = SimpleNamespace(world=Two()), Late()
    assert not _Trainer._is_stopped(trainer, stop)  # type: ignore[arg-type]
    assert _Trainer._is_stopped(trainer, stop)  # type: ignore[arg-type]
