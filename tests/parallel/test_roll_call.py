"""One rank that the others wait for in vain is named, with where it is."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from process_groups import run_ranks
from torch import distributed

from actmem.errors import ConfigError, Fault, RankError
from actmem.parallel.roll_call import called

pytestmark = pytest.mark.ranks


def dawdle(directory: Path) -> None:
    while not (directory / "said").exists():
        time.sleep(0.1)


def stand_still(directory: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def add_up(rank: int, directory: Path, missing: Callable[[Path], None]) -> None:
    """Three ranks, of which the second does not come. The first one keeps the store, so it ends last."""
    (directory / f"pid {rank}").write_text(str(os.getpid()))
    try:
        with called(rank, 3):
            if rank == 1:
                missing(directory)
            else:
                distributed.all_reduce(torch.ones(2))
    except RankError as error:
        (directory / f"rank {rank} says").write_text(str(error))
    if rank == 0:
        while not (directory / "rank 2 says").exists():
            time.sleep(0.1)
        (directory / "said").touch()
        os.kill(int((directory / "pid 1").read_text()), signal.SIGCONT)


@pytest.mark.parametrize(("missing", "where"), [(dawdle, "is in dawdle"), (stand_still, "does not answer")])
def test_who_does_not_come_is_named(tmp_path: Path, missing: Callable[[Path], None], where: str) -> None:
    run_ranks(add_up, 3, tmp_path, missing, timeout_s=3)
    for rank in (0, 2):
        said = (tmp_path / f"rank {rank} says").read_text()
        assert f"  rank 1 {where}" in said
        assert re.search(f"  rank {rank} (gave up|is) in all_reduce", said), said  # it may have been asked just before
        assert "raise parallel.timeout_seconds" in said


def test_other_errors_go_through() -> None:
    def fail() -> None:
        with called(0, 1):
            raise RuntimeError("a shape is wrong")

    distributed.init_process_group("gloo", store=distributed.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="a shape is wrong"):
            fail()
    finally:
        distributed.destroy_process_group()


def test_faults_are_heard_by_other_processes_as_they_were_said() -> None:
    error = ConfigError([Fault("train.lr", "is -1", allowed="more than 0")], "run.yaml")
    heard = pickle.loads(pickle.dumps(error))
    assert str(heard) == str(error)
    assert heard.faults == error.faults
