"""What tests of commands have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `CONFIG` of the test's module as a file in an empty working directory, on a terminal that is wide enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "run.yaml"
    path.write_text(request.module.CONFIG)
    return path
