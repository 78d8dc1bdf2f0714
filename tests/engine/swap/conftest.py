"""What the tests of swapping share."""

from __future__ import annotations

import pytest

from actmem.runtime.swap import disk


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models need no more threads than one each way."""
    monkeypatch.setattr(disk, "_MAX_THREADS", 1)
