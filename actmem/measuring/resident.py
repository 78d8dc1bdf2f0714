"""By how much a step makes the process grow: its resident set, as the kernel counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable

from actmem._compat import give_back_free_memory
from actmem.training.peak_memory import high_water_mark_bytes, resident_bytes, restart_high_water_mark


def measure_resident(step: Callable[[], object]) -> int | None:
    """The peak of the resident set during one `step`, above what it was before; ``None`` where the kernel won't tell.

    What the C library keeps of freed memory is given back before, so that steps measured after one another begin
    alike. It counts what torch's allocator does not see, and not what a step finds in the library's stock again.
    """
    gc.collect()
    give_back_free_memory()
    before = resident_bytes()
    if before is None or not restart_high_water_mark():
        return None
    step()
    return max(0, high_water_mark_bytes() - before)
