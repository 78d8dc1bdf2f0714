"""Who may import whom, and that only `_compat` knows torch's version and private names."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "actmem"

# Lowest first. A module imports from its own layer and from lower ones.
LAYERS = (
    {"errors", "units", "_compat"},
    {"files", "memory"},
    {"config"},
    {"graph"},
    {"hardware"},
    {"planning"},
    {"models"},
    {"runtime"},
    {"tracing"},
    {"parallel"},
    {"training"},
    {"measuring"},
    {"reporting"},
    {"cli"},
    {"__main__"},
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The folder or top-level module of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of each import from the package; the package itself is the part ``""``."""
    package = ["actmem", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, *inside = name.split(".")
            if root == "actmem":
                yield node.lineno, inside[0] if inside and inside[0] in HEIGHT else ""


def upward_imports(source: str, path: Path) -> list[str]:
    own = part_of(path)
    return [
        f"{path.name}:{line} ({own}) imports {part or 'the package itself'}"
        for line, part in imported_parts(ast.parse(source), path)
        if part == "" or (part != own and HEIGHT[part] >= HEIGHT[own])
    ]


def private_names(source: str) -> list[str]:
    """Where a module asks for torch's version, or reaches for a private name of a library it imports."""
    tree = ast.parse(source)
    libraries = dict(_library_names(tree))
    found = [f"{line}: {name}" for line, name in _imported(tree) if _is_private(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] in libraries:
            name = ".".join([libraries[chain[0]], *chain[1:]])
            if _is_private(name):
                found.append(f"{node.lineno}: {name}")
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _library_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names in the module -> what of a library they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _chain(node: ast.expr) -> list[str] | None:
    """``torch.nn.functional`` as its three names; `None` for what is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (inner := _chain(node.value)):
        return [*inner, node.attr]
    return None


def _is_private(name: str) -> bool:
    library, *inside = name.split(".")
    if library in ("actmem", "__future__") or name.startswith("torch.ops."):  # the names of ops, `_softmax` for one
        return False
    if name.startswith(("torch.__version__", "torch.version", "torch.torch_version")):
        return True
    return any(part.startswith("_") and not part.endswith("__") for part in [library, *inside])


def test_every_module_has_a_layer() -> None:
    assert {part_of(path) for path in MODULES} <= HEIGHT.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_import_only_their_own_layer_and_lower_ones(path: Path) -> None:
    assert upward_imports(path.read_text(), path) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_compat_knows_versions_and_private_names(path: Path) -> None:
    if path != PACKAGE / "_compat.py":
        assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import actmem.errors", False),
        ("from actmem import errors", False),
        ("from actmem.planning import plan", False),
        ("from .sibling import x", False),
        ("from ..graph import x", False),
        ("import torch", False),
        ("import actmem", True),
        ("from actmem import apply", True),
        ("from actmem.training import trainer", True),
        ("from actmem import training", True),
        ("from ..cli import x", True),
        ("def f():\n    from actmem.tracing import x", True),
        ("if TYPE_CHECKING:\n    import actmem.reporting.page", True),
    ],
)
def test_an_upward_import_is_found(source: str, wrong: bool) -> None:
    assert bool(upward_imports(source, PACKAGE / "planning" / "example.py")) == wrong


def test_modules_of_the_lowest_layer_do_not_import_each_other() -> None:
    assert upward_imports("from actmem.units import x", PACKAGE / "errors.py") != []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import torch\ntorch.nn.functional.silu", False),
        ("import torch\ntorch.ops.aten._softmax.default", False),
        ("from actmem._compat import hash_tensor", False),
        ("class A:\n    def f(self):\n        return self._x", False),
        ("import torch\ntorch.__version__", True),
        ("import torch\ntorch.version.cuda", True),
        ("import torch as t\nt._C._autograd", True),
        ("from torch import nn\nnn.modules._x", True),
        ("import torch._dynamo", True),
        ("from torch.utils._pytree import tree_map", True),
        ("from torch.nn import _reduction", True),
        ("def f():\n    from torch import __version__", True),
    ],
)
def test_a_private_name_is_found(source: str, wrong: bool) -> None:
    assert bool(private_names(textwrap.dedent(source))) == wrong
