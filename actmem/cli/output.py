"""Folders and files that commands write to: made before the work begins, and what goes wrong with them in words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actmem.errors import ActmemError


def make_directory(out: Path, files: Iterable[str]) -> None:
    """Make the folder `out` for `files`, before minutes of work rather than after. Raises `ActmemError`."""
    with told_if_unwritable(out):
        out.mkdir(parents=True, exist_ok=True)
    for path in (out / name for name in files):
        if path.is_dir():
            raise ActmemError(f"cannot write to {path}: it is a directory; name a folder without it")


def why_unwritable(file: Path) -> str | None:
    """Why no file can be written there, as far as it can be known before; what is no plain file, such as
    ``/dev/stdout``, can."""
    if file.is_dir():
        return "it is a directory"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    if not os.access(file if file.exists() and not file.is_file() else file.parent, os.W_OK):
        return f"the folder {file.parent} is not yours to write"
    return None


@contextmanager
def told_if_unwritable(out: Path) -> Iterator[None]:
    """Make an `ActmemError` of what writing to the folder `out` raises."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise ActmemError(f"cannot write to {where}: {error.strerror}; name a folder that takes files") from error
