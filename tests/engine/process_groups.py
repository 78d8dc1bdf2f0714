"""Real groups of processes on this machine, for what many ranks do together, and what they say to each other."""

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

from actmem._compat import DispatchMode, end_process

_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
_PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining", "transformers"]
multiprocessing.set_forkserver_preload([*_PRELOADED, "actmem.training.trainer"])  # or each process imports them anew


class Collectives(DispatchMode):
    """Notes every collective of every family, below all wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and "wait_tensor" not in (name := str(func)):
            self.order.append(name)
        return func(*args, **(kwargs or {}))


def run_ranks(work: Callable[..., None], num_ranks: int, *args: Any, timeout_s: float = 60) -> None:
    """`work(rank, *args)` in this many processes, the members of one group. `work` stands at the top of its module."""
    (port,) = free_ports(1)
    about = (num_ranks, port, timeout_s, work, args)
    multiprocessing.start_processes(_be_member, args=about, nprocs=num_ranks, start_method="forkserver")


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
