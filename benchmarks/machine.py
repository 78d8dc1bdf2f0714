"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
import transformers

from actmem.training.machine import cpu_name


@dataclass(frozen=True)
class Machine:
    """`num_cores` is what this process may use, `num_threads` what torch does use for one op."""

    cpu: str
    num_cores: int
    num_threads: int
    accelerator: str | None
    torch: str
    transformers: str
    python: str
    date: str

    @classmethod
    def here_and_now(cls) -> Machine:
        """The one that this process runs on."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return cls(
            cpu=cpu_name(),
            num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            num_threads=torch.get_num_threads(),
            accelerator=None if accelerator is None else str(accelerator),
            torch=torch.__version__,
            transformers=transformers.__version__,
            python=platform.python_version(),
            date=datetime.now(UTC).date().isoformat(),
        )

    def __str__(self) -> str:
        cores = f"{self.num_cores} cores, {self.num_threads} threads"
        return f"{self.cpu}, {cores}; torch {self.torch}, transformers {self.transformers}, Python {self.python}"
