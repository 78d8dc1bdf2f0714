"""The check of the documents finds what it is there to find."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "check_docs.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def faults(tool: ModuleType, page: Path, text: str) -> list[str]:
    page.write_text(text, encoding="utf-8")
    return list(tool.faults_of(page))


@pytest.mark.parametrize(
    "text",
    [
        "# A heading: of sorts\n[here](#a-heading-of-sorts) [there](other.md#part-two) [away](https://example.org/x.md)",
        'See configs/dense.yaml, `actmem/errors.py` and <img src="other.md">.',
        "```\n$ actmem check configs/dense.yaml train.steps=20 --json > out.json  # a comment\n```",
        "```\nactmem check \\\n  configs/dense.yaml\nmake test\n```",
        "`actmem check CONFIG` and `make` and `make check`, which make sense; actmem is one word",
    ],
)
def test_what_holds_is_passed_over(tool: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "other.md").write_text("## Part two\n")
    assert faults(tool, tmp_path / "page.md", text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("\n[there](nowhere.md)", "line 2: nowhere.md does not exist"),
        ("# One\n[there](#two)", "line 2: #two has no such heading"),
        ("see configs/nowhere.yaml", "line 1: configs/nowhere.yaml does not exist"),
        ('<img src="nowhere.svg">', "line 1: nowhere.svg does not exist"),
        ("`make nonsense`", "line 1: make nonsense is no target"),
        ("`actmem nonsense x`", "line 1: `actmem nonsense x` does not parse: Error: No such command 'nonsense'."),
        (
            "```\nactmem check a.yaml \\\n --jsom\n```",
            "line 2: `actmem check a.yaml --jsom` does not parse: Error: No such option: --jsom",
        ),
    ],
)
def test_what_does_not_hold_is_told(tool: ModuleType, tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tool, tmp_path / "page.md", text)
    assert found.startswith(fault.split(" (")[0])


def test_a_missing_page_is_told(tool: ModuleType, tmp_path: Path) -> None:
    assert list(tool.faults_of(tmp_path / "nowhere.md")) == ["is missing"]
