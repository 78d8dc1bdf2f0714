"""Files that are whole or not there: what a reader finds is the old text or the whole new one."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from actmem.errors import PlanError

Noun = TypeVar("Noun")


def replace_file(path: str | Path, text: str) -> None:
    """Write `text` to `path` in UTF-8; where that fails, with `OSError`, what stood there stays.

    The text goes to a file beside it, which then takes its place and has its mode. What is no plain file, such as
    ``/dev/stdout``, is written to as it is.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    descriptor, partial = _open_beside(target)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        partial.chmod(_mode_of(target))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _open_beside(target: Path) -> tuple[int, Path]:
    """A new file in the folder of `target`, open; what keeps it from being made is told of `target`."""
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".actmem-", suffix=".partial")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    return descriptor, Path(name)


def read_json(path: str | Path, name: str, read: Callable[[Mapping[str, Any]], Noun]) -> Noun:
    """What `read` makes of the JSON that ``save`` wrote for a `name`, such as ``graph``.

    Raises `PlanError` for a file that cannot be read, is cut short, or holds something else.
    """
    try:
        return read(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise PlanError(f"cannot read the {name} {path}: {error.strerror}; name a file that save wrote") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no {name}, or one cut short: {error}; name a file that save wrote") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"the {name} {path} is not as save wrote it: {error!r}; make it anew") from error


def check_format(data: object, name: str, version: int) -> None:
    """Raise `PlanError` unless `data` says that it is a `name`, in this version of its format."""
    if not isinstance(data, Mapping) or data.get(f"actmem_{name}") != version:
        raise PlanError(f"this is no {name}: it must hold actmem_{name}: {version}, as save writes it")


def _mode_of(path: Path) -> int:
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
