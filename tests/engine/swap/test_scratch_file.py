"""The scratch file is private, leaves nothing behind, and gives back every byte of every tensor."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from seeded import Schedule, SeededExecutor
from torch import Tensor

from actmem.runtime.swap import scratch_file
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.disk import DiskTier
from actmem.runtime.swap.ranges import Range
from actmem.runtime.swap.scratch_file import BLOCK, ScratchFile, default_directory, is_in_memory
from actmem.runtime.swap.storage import SwapOrder, bytes_of, can_be_swapped
from actmem.runtime.swap.swapper import Swapper

DIRECT = "direct"
FALLBACKS = (DIRECT, "no O_DIRECT", "no O_TMPFILE", "no fallocate")


@pytest.fixture(params=FALLBACKS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system can do."""
    opens = os.open

    def open_file(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if request.param == "no O_DIRECT" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        if request.param == "no O_TMPFILE" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no files without a name here")
        return opens(path, flags, *arguments, **options)

    def no_room_ahead(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no preallocation here")

    monkeypatch.setattr(os, "open", open_file)
    if request.param == "no fallocate":
        monkeypatch.setattr(os, "posix_fallocate", no_room_ahead)
    return str(request.param)


@pytest.fixture
def tier(tmp_path: Path, way: str) -> DiskTier:
    return DiskTier(tmp_path, None, SwapCounters())


def has_direct(directory: Path) -> bool:
    """Whether the file system has direct I/O for files without a name."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def test_the_file_is_private_and_has_no_name(tmp_path: Path, way: str) -> None:
    file = ScratchFile(tmp_path)
    status = os.fstat(file._fd)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert not os.get_inheritable(file._fd)
    file.grow(0, 2**20)
    assert os.fstat(file._fd).st_size == 2**20
    if way != "no O_TMPFILE":
        assert file.is_direct == (way != "no O_DIRECT" and has_direct(tmp_path))
    descriptor = file._fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), None, SwapCounters())
copy = tier.offload(torch.full((2**22,), 3, dtype=torch.uint8))
while not copy.has_left(0):
    pass
print(sorted(os.listdir(sys.argv[1])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip() == "[]" and list(tmp_path.iterdir()) == []


def there_and_back(tier: DiskTier, data: Tensor) -> Tensor:
    copy = tier.offload(data)
    assert copy is not None
    copy._write.result()
    return copy.begin_reload().finish()


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 4095, 4096, 4097, 65536, 100_000, 3 * 2**20 + 5])
def test_tensors_of_every_length_at_every_address(num_bytes: int, tier: DiskTier) -> None:
    room = torch.randint(0, 256, (num_bytes + 2 * BLOCK,), dtype=torch.uint8)
    aligned = -room.data_ptr() % BLOCK
    for shift in (0, 16, 64, 2048, BLOCK - 16, BLOCK - 1):
        data = room[aligned + shift : aligned + shift + num_bytes]
        back = there_and_back(tier, data)
        assert torch.equal(back, data)
        assert back.data_ptr() % BLOCK == data.data_ptr() % BLOCK


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_every_dtype(dtype: torch.dtype, tier: DiskTier) -> None:
    whole = torch.randn(40, 30).to(dtype)
    swapper = Swapper([tier], ["disk"], tier.counters, prefetch=1, min_swap_bytes=0, in_flight_limit=2**30)
    tensors = (whole, whole[3:, 5:], whole.t()[::2, 1:], whole[7, 9], whole.expand(2, 40, 30))
    for number, tensor in enumerate(tensors, 1):
        call = swapper.begin_call("here")
        expected = tensor.clone()
        view = swapper.swap(tensor, SwapOrder("op", None), call, verify=True)
        assert view is not None
        view.storage.copy._write.result()  # type: ignore[union-attr]
        swapper._settle()
        assert view.storage.has_copy and view.storage.data is None
        view.storage.uses = 2
        back = swapper.take(view)
        assert back.dtype is dtype and back.shape == tensor.shape and back.stride() == tensor.stride()
        assert torch.equal(bytes_of(back.clone()), bytes_of(expected))
        again = swapper.take(view)
        assert again.data_ptr() == back.data_ptr(), "the second use reads nothing"
        assert view.storage.data is None and swapper.counters.num_in == number
        del view, back, again
        swapper._known.clear()


def test_only_plain_tensors_can_be_swapped() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    refused = [
        weight,
        weight[1:],
        weight.t(),
        torch.ones(4, dtype=torch.long),
        torch.ones(4) > 0,
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4).to_sparse(),
        torch.ones(0),
        torch.frombuffer(bytearray(64), dtype=torch.uint8)[1:].view(torch.uint8),
    ]
    assert [can_be_swapped(each) for each in refused] == [False] * len(refused)
    assert all(map(can_be_swapped, (torch.ones(4), torch.ones(4)[1:], (weight * 2).t(), weight.detach().clone())))


def test_writes_side_by_side_do_not_touch_each_other(tier: DiskTier) -> None:
    data = [torch.full((4096 * 3 + number,), number, dtype=torch.uint8) for number in range(50)]
    copies = [tier.offload(each) for each in data]
    for each in copies[::2]:
        each._write.result()  # type: ignore[union-attr]
    del each
    copies[::2] = [tier.offload(each) for each in data[::2]]
    for copy, expected in zip(copies, data, strict=True):
        assert copy is not None
        copy._write.result()
        assert torch.equal(copy.begin_reload().finish(), expected)


def test_a_place_is_free_again_only_after_its_last_read(tier: DiskTier) -> None:
    copy = tier.offload(torch.ones(BLOCK, dtype=torch.uint8))
    assert copy is not None
    copy._write.result()
    reload = copy.begin_reload()
    del copy
    reload.finish()
    tier.usage().free(())
    assert tier.usage().used_bytes == 0


def test_a_withdrawn_write_gives_its_place_back_and_lets_the_memory_go(tmp_path: Path) -> None:
    schedule = Schedule(0, laziness=1.0)
    tier = DiskTier(tmp_path, None, SwapCounters(), writer=SeededExecutor(schedule), reader=SeededExecutor(schedule))
    data = torch.ones(BLOCK)
    copy = tier.offload(bytes_of(data))
    assert copy is not None and copy.withdraw() and copy._data is None
    del copy
    assert tier.usage().used_bytes == 0


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.grow(0, BLOCK)
    room = torch.empty(3 * BLOCK, dtype=torch.uint8)
    address = room.data_ptr() + -room.data_ptr() % BLOCK
    with pytest.raises(OSError, match="the file ends at offset 4096"):
        file.read(address, [Range(0, 2 * BLOCK)])


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_calls_that_move_odd_parts_are_continued_at_a_block(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct I/O cannot go on in the middle of one."""
    moves, offsets = getattr(os, name), []

    def move_less(fd: int, part: Any, offset: int) -> int:
        offsets.append(offset)
        moved = moves(fd, part, offset)
        return moved - 100 if moved > BLOCK else moved

    monkeypatch.setattr(os, name, move_less)
    tier = DiskTier(tmp_path, None, SwapCounters())
    data = torch.randint(0, 256, (10 * BLOCK,), dtype=torch.uint8)
    assert torch.equal(there_and_back(tier, data), data)
    assert len(offsets) > 1
    assert not tier.file.is_direct or all(offset % BLOCK == 0 for offset in offsets)


def test_no_way_to_make_a_file_is_an_error(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    for directory in (tmp_path / "missing", taken):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            ScratchFile(directory)


def test_directories_in_memory_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(scratch_file, "_MOUNTS", mounts)
    monkeypatch.setattr(scratch_file.tempfile, "gettempdir", lambda: str(tmp_path))
    assert not is_in_memory(tmp_path), "where nobody says, files are on a disk"
    spaced = tmp_path / "a b"
    spaced.mkdir()
    mounts.write_text(f"none / ext4 rw 0 0\nnone {spaced} tmpfs rw 0 0\n".replace("a b", "a\\040b"))
    assert is_in_memory(spaced / "deeper") and not is_in_memory(tmp_path)
    assert default_directory() == tmp_path
    mounts.write_text(f"none / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n")
    assert default_directory() == Path("/var/tmp")
