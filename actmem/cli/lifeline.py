"""Ranks whose launcher is gone stop by themselves: nobody else would end them."""

from __future__ import annotations

import os
import signal
import threading
import time

_LOOK_EVERY_S = 1.0


def end_with_launcher() -> None:
    """Have this process stop, as by SIGTERM, when the launcher that started it, if one did, is gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
