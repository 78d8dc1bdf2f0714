"""One rank that the others wait for in vain is named, with where it is."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
from process_groups import run_ranks
from torch import distributed

from actmem.errors import ConfigError, Fault, RankError
from actmem.parallel.roll_call import called

pytestmark = pytest.mark.slow


def dawdle(said: Path) -> None:
    while not said.exists():
        time.sleep(0.1)


def hang(said: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def add_up(rank: int, directory: Path, kind: str) -> None:
    """Three ranks, of which the second does not come."""
    said = directory / kind
    try:
        with called(rank, 3):
            if rank == 1:
                {"dawdle": dawdle, "hang": hang}[kind](said)
            else:
                distributed.all_reduce(torch.ones(2))
    except RankError as error:
        if rank == 0:
            (directory / "written").write_text(str(error))
            (directory / "written").rename(said)
    if rank == 0 and kind == "hang":
        os.kill(int((directory / "pid").read_text()), signal.SIGKILL)


def add_up_as_told(rank: int, directory: Path, kind: str) -> None:
    if rank == 1:
        (directory / "pid").write_text(str(os.getpid()))
    add_up(rank, directory, kind)


@pytest.mark.parametrize(("kind", "missing"), [("dawdle", "is in dawdle"), ("hang", "does not answer")])
def test_who_does_not_come_is_named(tmp_path: Path, kind: str, missing: str) -> None:
    try:
        run_ranks(add_up_as_told, 3, tmp_path, kind, timeout_s=3)
    except torch.multiprocessing.ProcessExitedException as error:
        assert kind == "hang" and error.signal_name == "SIGKILL", error
    said = (tmp_path / kind).read_text()
    assert "  rank 0 gave up in all_reduce, called by " in said or "  rank 0 gave up in all_reduce\n" in said
    assert f"  rank 1 {missing}" in said
    assert "  rank 2 gave up in all_reduce" in said or "  rank 2 is in all_reduce" in said
    assert "raise parallel.timeout_seconds" in said


def test_other_errors_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with called(0, 1):
            raise RuntimeError("a shape is wrong")

    distributed.init_process_group("gloo", store=distributed.TCPStore("127.0.0.1", 0, 1), rank=0, world_size=1)
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
