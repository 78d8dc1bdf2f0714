"""Ranks whose launcher is gone stop by themselves: nobody else would end them."""

from __future__ import annotations

import os
import signal
import threading
import time

_LAUNCHER = "ACTMEM_LAUNCHER"
"""Variable of the environment: the process that has started this one."""
_LOOK_EVERY_S = 1.0


def be_launcher() -> None:
    """Let processes that this one starts know it."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """Have this process stop, as by SIGTERM, when the launcher that started it, if one did, is gone."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is not None:
        threading.Thread(target=_watch, args=(int(launcher),), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
