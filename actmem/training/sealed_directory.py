"""Directories on disk that are whole or not there, and that say so themselves.

A sealed directory is written beside its place under a name that ends in `.partial`, gets a manifest with the size and
SHA-256 of each file, is flushed to the disk, and only then takes its name, in one rename. A process that dies on the
way leaves a `.partial`, which nothing reads and `remove_partial` clears away.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"


@contextmanager
def writing_directory(target: Path) -> Iterator[Path]:
    """A new directory to fill, which becomes `target` when the block ends and vanishes when it raises.

    A `target` that is already there is replaced. Raises what the filesystem raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _flush_tree(partial)
        if target.exists():
            remove_directory(target)
        partial.rename(target)
        _flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def passing_directory(directory: Path, name: str) -> Iterator[Path]:
    """A new directory of this name inside another, which is gone when the block ends; one that a process left behind
    which died in its own block goes first."""
    passing = directory / f"{name}{_PARTIAL}"
    shutil.rmtree(passing, ignore_errors=True)
    passing.mkdir(parents=True)
    try:
        yield passing
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def seal(directory: Path, format_version: int) -> None:
    """Write the manifest of the files in `directory`."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(directory.iterdir())}
    manifest = {"format": format_version, "files": files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def sealed_format(directory: Path) -> int | None:
    """The format version in the manifest of `directory`, or `None` where there is no manifest that can be read."""
    try:
        version = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def damage(directory: Path) -> str | None:
    """What is wrong with a sealed directory, against its manifest; `None` for an intact one. Reads every byte."""
    try:
        files = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            if fault := _file_damage(directory / name, expected["bytes"], expected["sha256"]):
                return f"{name} {fault}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} cannot be read: {error!r}"
    return None


def remove_directory(directory: Path) -> None:
    """Remove a sealed directory, under another name first: half of one must not look like a whole one."""
    doomed = directory.with_name(f"{directory.name}.old{_PARTIAL}")
    directory.rename(doomed)
    shutil.rmtree(doomed)


def remove_partial(parent: Path) -> None:
    """Clear away what writers that died left in `parent`. Nobody may be writing there."""
    for partial in parent.glob(f"*{_PARTIAL}"):
        shutil.rmtree(partial)


def _file_damage(path: Path, num_bytes: int, sha256: str) -> str | None:
    found = path.stat().st_size
    if found != num_bytes:
        return f"has {found} bytes, and {num_bytes} were written"
    return None if _sha256(path) == sha256 else "has other contents than were written (SHA-256)"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
