"""`actmem` in a process that kills itself in the middle of something: `torchrun doomed.py train CONFIG`.

`DOOM` in the environment says which rank, in what, at which time it is there, and after how long: ``1 swap 3 0.0``.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from actmem.runtime.swap.swapper import Swapper
from actmem.training import checkpoint


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def countdown(time: int, delay_s: float) -> Callable[[], None]:
    """To be called each time; the one that is meant is the last thing this process does, or nearly so."""
    seen = count(1)

    def tick() -> None:
        if next(seen) != time:
            return
        if delay_s:
            threading.Timer(delay_s, die).start()
        else:
            die()

    return tick


def before(owner: Any, name: str, tick: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        tick()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def in_backward(tick: Callable[[], None]) -> None:
    original = Qwen3MLP.forward

    def watched(self: Qwen3MLP, states: Tensor) -> Tensor:
        out: Tensor = original(self, states)
        out.register_hook(lambda gradient: tick())  # type: ignore[no-untyped-call]
        return out

    setattr(Qwen3MLP, "forward", watched)  # noqa: B010


MOMENTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "forward": lambda tick: before(Qwen3MLP, "forward", tick),
    "backward": in_backward,
    "swap": lambda tick: before(Swapper, "_copy_to_a_tier", tick),
    "checkpoint": lambda tick: before(checkpoint, "save_shards", tick),
}

if __name__ == "__main__":
    rank, moment, time, delay = os.environ["DOOM"].split()
    if os.environ["RANK"] == rank:
        MOMENTS[moment](countdown(int(time), float(delay)))
    runpy.run_module("actmem", run_name="__main__")
