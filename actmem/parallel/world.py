"""The processes of a run: who they are, what they agree on, and what they say to each other.

A run of one process needs no process group: then all of this is there and does nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from actmem.config.schema import ParallelConfig, RunConfig
from actmem.config.shown import shown
from actmem.errors import ActmemError, ConfigError, Fault, LayoutError, RankError
from actmem.parallel.mesh import Mesh, build_mesh
from actmem.parallel.roll_call import called, first_line

Said = TypeVar("Said")
_PACKAGES = ("torch", "transformers", "safetensors")
_MAY_DIFFER = ("train.device",)


@dataclass(frozen=True)
class World:
    """This process among those of the run. `device` is its own."""

    mesh: Mesh
    device: torch.device
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it writes the files that there is one of."""
        return self.rank == 0

    def sum_over_data(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all that read data of their own, in place."""
        for group in self.mesh.data_groups:
            distributed.all_reduce(value, group=group)
        return value

    def sum_over_stages(self, value: Tensor) -> Tensor:
        """The sum over the stages of this process's pipeline, in place."""
        group = self.mesh.group("pp")
        if group is not None:
            distributed.all_reduce(value, group=group)
        return value

    def gather(self, said: Said) -> list[Said]:
        """What each process says, by rank."""
        if self.size == 1:
            return [said]
        heard: list[Any] = [None] * self.size
        distributed.all_gather_object(heard, said)
        return heard

    def tell(self, said: Any) -> Any:
        """What the first process says."""
        if self.size == 1:
            return said
        box: list[Any] = [said]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def from_first(self, work: Callable[[], Said]) -> Said:
        """What `work` gives in the first process, in all of them; an `ActmemError` there is raised in all."""
        if self.size == 1:
            return work()
        heard: Said | ActmemError = self.tell(_result_or_error(work) if self.is_first else None)
        if isinstance(heard, ActmemError):
            heard.is_repeated = not self.is_first
            raise heard
        return heard

    def first_goes_ahead(self, work: Callable[[], Said]) -> Said:
        """`work` in the first process and, once that is done, in all others; an error there is raised in all."""
        made: list[Said] = []
        self.from_first(lambda: made.append(work()))
        return made[0] if made else work()

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            distributed.barrier()


def _result_or_error(work: Callable[[], Said]) -> Said | ActmemError:
    try:
        return work()
    except ActmemError as error:
        return error


@contextmanager
def join(config: RunConfig, device: torch.device) -> Iterator[World]:
    """The world of a run, from what ``torchrun`` told this process; left when the block ends.

    Raises `ConfigError` where another number of processes was started than the section `parallel` is for, `LayoutError`
    where the processes differ in configuration or packages, and `RankError` for one that the others waited for in vain.
    """
    sizes, size = config.parallel, int(os.environ.get("WORLD_SIZE", "1"))
    refuse_other_number(config, size)
    if size == 1:
        yield World(build_mesh(sizes, device.type), device, 0, 1)
        return
    device = _own_device(device)
    _meet(device, config.parallel.timeout_seconds)
    try:
        with called(distributed.get_rank(), size):
            refuse_differences(_description(config))
            world = World(build_mesh(sizes, device.type), device, distributed.get_rank(), size)
            yield world
            world.wait()
    finally:
        distributed.destroy_process_group()


def _meet(device: torch.device, timeout_s: float) -> None:
    """Join the group of all processes. Raises `RankError` where one does not come."""
    try:
        distributed.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s), device_id=_bound(device))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the processes of this run did not come together ({first_line(error)}): one was not started, was stopped, "
            "or cannot be reached; start all of them with actmem train --nproc or torchrun, or raise "
            "parallel.timeout_seconds where they take longer"
        ) from error


def refuse_other_number(config: RunConfig, size: int) -> None:
    """Raise `ConfigError` unless the section `parallel` is for `size` processes."""
    if config.parallel.world_size != size:
        raise ConfigError([_wrong_number(config, size)])


def refuse_differences(mine: dict[str, str]) -> None:
    """Raise `LayoutError`, in all processes, where one of them says something else than the first."""
    heard: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(heard, mine)
    found = [
        f"rank {rank} has {name} {theirs.get(name)}, rank 0 {heard[0].get(name)}"
        for rank, theirs in enumerate(heard)
        for name in heard[0].keys() | theirs.keys()
        if theirs.get(name) != heard[0].get(name)
    ]
    if found:
        error = LayoutError(
            "the processes of this run differ, and would not compute the same:\n  "
            + "\n  ".join(sorted(found))
            + "\n  start all of them with one configuration and the same packages"
        )
        error.is_repeated = distributed.get_rank() > 0
        raise error


def _wrong_number(config: RunConfig, size: int) -> Fault:
    sizes, own = config.parallel, config.parallel.world_size
    named = ("dp_replicate_size", "dp_shard_size", "tp_size", "pp_size")
    product = " x ".join(f"{name} {shown(value)}" for name in named if (value := getattr(sizes, name)) > 1)
    problem = (
        f"is for {f'{product} = ' if product else ''}{_processes(own)}, and {size} {'runs' if size == 1 else 'run'}"
    )
    return Fault("parallel", problem, allowed=f"{_start(own)}; or {_sizes_for(sizes, size)}")


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{shown(number)} processes"


def _start(number: int) -> str:
    """How that many processes are started."""
    alone = "one process, as actmem train CONFIG starts"
    return alone if number == 1 else f"as many as it says: actmem train CONFIG --nproc {shown(number)}, or torchrun"


def _sizes_for(sizes: ParallelConfig, number: int) -> str:
    """What to set for that many processes."""
    more, rest = divmod(number, sizes.world_size)
    if rest:
        return f"sizes whose product is {number}"
    shards, copies = sizes.dp_shard_size * more, sizes.dp_replicate_size * more
    return (
        f"for {_processes(number)} parallel.dp_shard_size: {shown(shards)}, which shares the parameters out, or "
        f"parallel.dp_replicate_size: {shown(copies)}, which copies them"
    )


def _own_device(device: torch.device) -> torch.device:
    """The accelerator with this process's number on its machine."""
    if device.type == "cpu":
        return device
    own = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(own.index)
    return own


def _backend(device: torch.device) -> str:
    """Objects and files go over the CPU, tensors over the accelerator's own library."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"


def _bound(device: torch.device) -> torch.device | None:
    return None if device.type == "cpu" else device


def _description(config: RunConfig) -> dict[str, str]:
    """What has to be the same in all processes."""
    written = config.model_dump(mode="json")
    said = {name: str(value) for name, value in _leaves(written) if name not in _MAY_DIFFER}
    said |= {f"package {name}": version(name) for name in _PACKAGES}
    return said | {"Python": platform.python_version(), "actmem": _own_code()}


def _leaves(written: Any, path: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(written, dict):
        for name, value in written.items():
            yield from _leaves(value, (*path, str(name)))
    else:
        yield ".".join(path), written


def _own_code() -> str:
    """A digest of the package's own files: a checkout has no version that changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
