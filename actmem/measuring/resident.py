"""What the activations of a step add to the process, as the kernel counts it: its resident set."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from actmem._compat import give_back_free_memory
from actmem.training.peak_memory import resident_bytes


def measure_resident(forward: Callable[[], Tensor]) -> int | None:
    """By how much the resident set has grown when `forward` has returned a loss, whose backward pass is run afterwards;
    ``None`` where the kernel does not tell.

    That is when all activations stand. What the C library keeps of freed memory is given back before each look, so that
    only memory that is in use counts; it does not do so by itself.
    """
    gc.collect()
    give_back_free_memory()
    before = resident_bytes()
    loss = forward()
    give_back_free_memory()
    after = resident_bytes()
    loss.backward()
    return None if before is None or after is None else max(0, after - before)
