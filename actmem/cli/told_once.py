"""What several processes of a run have to say, said once where all of them would say the same."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_PLACE = "ACTMEM_TOLD_DIRECTORY"
_PATIENCE_S = 10.0


@contextmanager
def told_once() -> Iterator[None]:
    """Processes that are started inside tell each message once, all of them together."""
    with TemporaryDirectory(prefix="actmem-") as directory:
        os.environ[_PLACE] = directory
        try:
            yield
        finally:
            del os.environ[_PLACE]


def is_news(message: str) -> bool:
    """Whether no other process of this run has told this message, which from now on is told."""
    directory = os.environ.get(_PLACE)
    if directory is None:
        return True
    try:
        (Path(directory) / hashlib.sha256(message.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    except FileNotFoundError:  # whoever started this process has ended
        return True
    return True


def is_first_rank() -> bool:
    """Whether this process speaks for a run: the first of several, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_first() -> None:
    """Give the first process on this machine time to say the same. Its end ends this one, who returns where it had
    nothing to say."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_PATIENCE_S)
