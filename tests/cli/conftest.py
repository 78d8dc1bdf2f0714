"""What tests of commands have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `CONFIG` of the test's module as a file in an empty working directory, on a terminal that is wide enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "run.yaml"
    path.write_text(request.module.CONFIG)
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products on one thread: others would only wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
