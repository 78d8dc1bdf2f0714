"""What commands print, and where, without a command."""

from __future__ import annotations

import os

import pytest
from rich.table import Table

from actmem.cli import progress as progress_module
from actmem.cli.progress import progress
from actmem.cli.screen import Screen
from actmem.cli.told_once import is_news, told_once
from actmem.reporting.tables import plain_table

NAME = "self_attn." * 30 + "mm"


def wide_table() -> Table:
    table = plain_table("op", ("bytes",), ("why",))
    table.add_row(NAME, "1", "because of this and that " * 10)
    return table


def test_in_a_pipe_a_table_is_as_wide_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    Screen().table(wide_table())
    assert NAME in capsys.readouterr().out


def test_where_the_columns_are_told_a_table_keeps_to_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Screen().table(wide_table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_in_a_pipe_long_work_is_told_by_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    with progress("bench", 8) as on_step:
        for step in range(8):
            now += 4.0
            on_step(f"policy-{step}")
    assert capsys.readouterr().err.splitlines() == ["bench: 3 of 8, policy-2", "bench: 6 of 8, policy-5"]


def test_processes_of_one_run_tell_a_message_once() -> None:
    assert is_news("x") and is_news("x")
    with told_once():
        assert is_news("x") and is_news("y") and not is_news("x")
    assert is_news("x") and "ACTMEM_TOLD_DIRECTORY" not in os.environ
