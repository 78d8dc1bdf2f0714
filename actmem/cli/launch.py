"""Starting the processes of a run on this machine, and saying how they ended."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser, run

from actmem.cli.screen import Screen
from actmem.cli.told_once import told_once
from actmem.training.run_directory import RunDirectory

_TORCHS_OWN = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


def launch(num_processes: int, arguments: Sequence[str], directory: RunDirectory) -> int:
    """Run ``actmem`` with `arguments`, but for ``--nproc``, in that many processes; returns the exit code for all.

    One that fails ends the others. The first to fail is named, with how it ended, unless it said so itself; whether
    there is a checkpoint to go on from is seen in `directory`. A signal is passed on to all of them. The cores are
    shared out among them, unless ``OMP_NUM_THREADS`` says otherwise.
    """
    given = ["--standalone", f"--nproc-per-node={num_processes}", "-m", "actmem", *_without_nproc(arguments)]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    for name in _TORCHS_OWN:  # how processes end is said below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with told_once():
            run(get_args_parser().parse_args(given))
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        if failure.exitcode not in (2, 130, 143):
            Screen(stderr=True).line(f"{_how_it_ended(rank, failure)}; {_how_to_go_on(directory)}", style="red")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _how_it_ended(rank: int, failure: ProcessFailure) -> str:
    how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else signal.Signals(-failure.exitcode).name
    return f"rank {rank} ended first, by {how}; the others were stopped"


def _how_to_go_on(directory: RunDirectory) -> str:
    if directory.has_checkpoint:
        return "run again to go on from the last checkpoint"
    return "there is no checkpoint yet, so a new run starts from the beginning"


def _without_nproc(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for each in arguments:
        if skip or each == "--nproc" or each.startswith("--nproc="):
            skip = each == "--nproc"
            continue
        kept.append(each)
    return kept
