"""The directory a run writes to: which file is where, and that only one run writes at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from actmem.errors import CheckpointError

_LOCK = ".lock"


class RunDirectory:
    """Paths below a run's `train.output_dir`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self.model = root / "model"

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run can go on from here."""
        return any(self.checkpoints.glob("step-*[0-9]"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory, made if need be, for one run; the kernel lets go of it when the process ends. The lock's
        file says who holds it.

        Raises `CheckpointError` where it cannot be written or another run holds it.
        """
        with self._open_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise CheckpointError(
                    f"another run{lock.read()} is writing to {self.root}; wait for it, or set another train.output_dir"
                ) from error
            lock.truncate(0)
            print(f", process {os.getpid()} on {socket.gethostname()},", end="", file=lock, flush=True)
            os.fsync(lock)
            yield

    def holder(self) -> str | None:
        """Who holds the directory, as its lock says; ``None`` where there is no lock."""
        lock = self.root / _LOCK
        return lock.read_text() if lock.exists() else None

    def _open_lock(self) -> IO[str]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            return (self.root / _LOCK).open("a+")
        except OSError as error:
            raise CheckpointError(
                f"train.output_dir {self.root} cannot be written: {error}; set a directory that can"
            ) from error
