"""Real groups of processes on this machine, for what many ranks do together."""

from __future__ import annotations

import gc
import socket
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, multiprocessing

from actmem._compat import end_process


def run_ranks(work: Callable[..., None], num_ranks: int, *args: Any, timeout_s: float = 60) -> None:
    """`work(rank, *args)` in this many processes, the members of one group. `work` stands at the top of its module."""
    (port,) = free_ports(1)
    multiprocessing.spawn(_be_member, args=(num_ranks, port, timeout_s, work, args), nprocs=num_ranks)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _be_member(
    rank: int, num_ranks: int, port: int, timeout_s: float, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # what libraries made when they were imported need not be gone through each time
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    work(rank, *args)
    distributed.destroy_process_group()
    end_process(0)
