"""`actmem.__all__` is the public API: all of it, and nothing that is not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import actmem

SOURCE = Path(actmem.__file__)
EXPORTS = getattr(actmem, "__all__", [])


def public_names(source: str) -> set[str]:
    """What a package's `__init__` defines, or imports from the package itself, under a public name.

    Imports of other libraries are not counted: they are means, not the API. Imports under `TYPE_CHECKING` are, for
    that is how a name that is loaded on first use is written down.
    """
    return {name for name in _bound(ast.parse(source).body) if not name.startswith("_")}


def _bound(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=module, names=names, level=level) if level or _is_ours(module):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If(body=body, orelse=orelse):
                yield from _bound(body + orelse)


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "actmem"


def test_all_lists_exactly_the_public_names() -> None:
    exported = {name for name in EXPORTS if not name.startswith("_")}
    assert exported == public_names(SOURCE.read_text())


def test_every_exported_name_exists_once() -> None:
    assert len(EXPORTS) == len(set(EXPORTS))
    for name in EXPORTS:
        assert hasattr(actmem, name), name


def test_public_names_are_found_however_they_are_bound() -> None:
    source = """
from __future__ import annotations
from typing import TYPE_CHECKING
from actmem.errors import ActmemError as Root
from actmem.errors import _hidden
if TYPE_CHECKING:
    from .runtime import apply
__version__ = "1"
GiB: int = 2**30
def trace(): ...
class Plan: ...
"""
    assert public_names(source) == {"Root", "apply", "GiB", "trace", "Plan"}
