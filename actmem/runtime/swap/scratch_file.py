"""A private file without a name, for bytes that nobody needs when the process is gone.

Memory goes straight to it and back, past the page cache, so that it really leaves the process and nobody copies it on
the way. Such direct I/O wants memory, offset and length in whole blocks. So the blocks around a storage are written,
whatever else of this process lies in them, and read back into memory that begins at the same place of a block.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from actmem.runtime.swap.ranges import Range
from actmem.runtime.swap.tier import SwapWarning

BLOCK = 4096
_AT_ONCE = 2**30  # Linux moves at most 2 GiB - 4 KiB in one call
_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = {"tmpfs", "ramfs"}
_NOT_SUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class ScratchFile:
    """An unlinked file of mode 0600 in `directory`. Raises `OSError` where none can be made there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fd, self.is_direct = _open(directory)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def grow(self, start: int, num_bytes: int) -> None:
        """Reserve `num_bytes` of disk from `start` on."""
        try:
            os.posix_fallocate(self._fd, start, num_bytes)
        except AttributeError:
            os.ftruncate(self._fd, start + num_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            os.ftruncate(self._fd, start + num_bytes)

    def write(self, address: int, num_bytes: int, ranges: Sequence[Range]) -> None:
        """Write the blocks around `num_bytes` of memory at `address` to `ranges`, one after the other."""
        start = address - address % BLOCK
        for each in ranges:
            done = 0
            while done < each.num_bytes:
                part = _memory(start + done, min(each.num_bytes - done, _AT_ONCE))
                written = self._whole_blocks(os.pwrite(self._fd, part, each.start + done), part)
                if written <= 0:
                    raise OSError(errno.EIO, f"nothing could be written at offset {each.start + done}")
                done += written
            start += each.num_bytes
        if not self.is_direct:
            self._drop_from_cache(ranges, written=True)

    def read(self, address: int, ranges: Sequence[Range]) -> None:
        """Fill memory from the block at `address` on from `ranges`, one after the other."""
        for each in ranges:
            done = 0
            while done < each.num_bytes:
                part = _memory(address + done, min(each.num_bytes - done, _AT_ONCE))
                read = self._whole_blocks(os.preadv(self._fd, [part], each.start + done), part)
                if read <= 0:
                    raise OSError(errno.EIO, f"the file ends at offset {each.start + done}")
                done += read
            address += each.num_bytes
        if not self.is_direct:
            self._drop_from_cache(ranges, written=False)

    def _whole_blocks(self, moved: int, part: memoryview) -> int:
        """What of `part` need not be moved again: one call may end within a block, where direct I/O cannot go on."""
        return moved // BLOCK * BLOCK if self.is_direct and moved < len(part) else moved

    def _drop_from_cache(self, ranges: Sequence[Range], *, written: bool) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        if written:
            os.fdatasync(self._fd)
        for each in ranges:
            os.posix_fadvise(self._fd, each.start, each.num_bytes, os.POSIX_FADV_DONTNEED)


def num_block_bytes(address: int, num_bytes: int) -> int:
    """Bytes of the whole blocks around `num_bytes` of memory at `address`."""
    return -(-(address % BLOCK + num_bytes) // BLOCK) * BLOCK


def default_directory() -> Path:
    """Where temporary files go, unless that is memory: then ``/var/tmp``."""
    usual = Path(tempfile.gettempdir())
    lasting = Path("/var/tmp")
    return lasting if is_in_memory(usual) and os.access(lasting, os.W_OK) and not is_in_memory(lasting) else usual


def is_in_memory(directory: Path) -> bool:
    """Whether files in `directory` lie in memory, so that writing them frees none."""
    if not _MOUNTS.exists():
        return False
    kinds = {}
    for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split()
        kinds[point.replace("\\040", " ")] = kind
    here = directory.resolve()
    return next((kinds[str(each)] in _IN_MEMORY for each in (here, *here.parents) if str(each) in kinds), False)


def _open(directory: Path) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    for extra in dict.fromkeys((direct, 0)):
        try:
            fd = _open_unlinked(directory, extra)
        except OSError as error:
            if extra and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                continue
            raise
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd, bool(extra)
    raise AssertionError("the last try either returns or raises")


def _open_unlinked(directory: Path, extra: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | extra, 0o600)
        except OSError as error:
            # Not every file system has files without a name, and old kernels take the flag for O_DIRECTORY.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT) or not directory.is_dir():
                raise
    fd, name = tempfile.mkstemp(dir=directory)
    try:
        if not extra:
            return fd
        os.close(fd)
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | extra)
    finally:
        Path(name).unlink()


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def warn_if_in_memory(directory: Path) -> None:
    """Say so where swapping to `directory` would move memory into memory."""
    if is_in_memory(directory):
        warnings.warn(
            f"memory.disk_path {directory} lies in memory (tmpfs), so swapping there frees none: name a directory on a "
            "disk",
            SwapWarning,
            stacklevel=2,
        )
