"""Disks fill, fail and lie, memory cannot be had: training goes on with the same gradients, or stops and says why."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import assert_same_steps, assert_same_tensors, features, stack_steps
from swapped_runs import EVERYTHING, SWAP, seeded_plan, small_stack, stack_without_plan, tiny, tiny_steps
from swapped_runs import tiny_without_plan as without_plan
from torch import Tensor

from actmem.errors import ApplyError, ConfigError, SwapError
from actmem.planning import Plan, Rule
from actmem.runtime import Applied, apply
from actmem.runtime.swap.host import HostMemory, SlabPool
from actmem.runtime.swap.ranges import Range
from actmem.runtime.swap.scratch_file import ScratchFile
from actmem.runtime.swap.swapper import SwapWarning

HABIT = "one_storage_many_readers"
REGIONS = ["blocks.0", "blocks.1"]
KINDS = ("disk", "staged")


def file_of(applied: Applied) -> ScratchFile:
    """The scratch file behind a plan."""
    tier: Any = applied._engine.swapper._tiers["disk"]
    return getattr(tier, "disk", tier).file


def fail_at(file: ScratchFile, name: str, is_due: Callable[[int], bool], number: int) -> None:
    """Let the calls of `file.write` or `file.read` fail for which `is_due` says so, counting from 0."""
    calls = iter(range(10**9))
    works = getattr(file, name)

    def fail_or_work(*arguments: Any) -> Any:
        if is_due(next(calls)):
            raise OSError(number, os.strerror(number))
        return works(*arguments)

    setattr(file, name, fail_or_work)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    """What the swapper warned of."""
    return [str(each.message) for each in caught if issubclass(each.category, SwapWarning)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_loses_nothing_and_closes_the_tier(kind: str, number: int, tmp_path: Path) -> None:
    for position in range(7):
        with (
            warnings.catch_warnings(record=True) as caught,
            seeded_plan(
                small_stack(HABIT), EVERYTHING, tmp_path, seed=position, kinds=(kind,), regions=REGIONS, verify="always"
            ) as run,
        ):
            warnings.simplefilter("always")
            fail_at(file_of(run.applied), "write", lambda call, at=position: call >= at, number)
            assert_same_steps(stack_steps(run.model), stack_without_plan(HABIT), f"write {position} fails")
            swap = run.applied.stats.swap
        assert len(told(caught)) == (swap.num_failed > 0), told(caught)
        if swap.num_failed:
            assert "tier disk is closed" in told(caught)[0] and os.strerror(number) in told(caught)[0]
            assert not run.swapper._tiers["disk"].is_open
    assert swap.num_out > 0, "the last position leaves room for writes that work"


def test_a_single_failed_write_closes_the_tier_for_good(tmp_path: Path) -> None:
    with (
        pytest.warns(SwapWarning, match="tier disk is closed"),
        seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, regions=REGIONS) as run,
    ):
        fail_at(file_of(run.applied), "write", lambda call: call == 0, errno.EIO)
        assert_same_steps(stack_steps(run.model), stack_without_plan(HABIT))
        before = run.applied.stats.swap
        stack_steps(run.model, num_steps=1)
        assert run.applied.stats.swap.num_out == before.num_out


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_disk_leaves_the_other_tier_open(kind: str, tmp_path: Path) -> None:
    """Two tiers, the second fails: what the first has room for still goes there."""
    with (
        pytest.warns(SwapWarning, match="tier disk is closed"),
        seeded_plan(small_stack(HABIT), DISK_FIRST, tmp_path, kinds=("host", kind), regions=REGIONS) as run,
    ):
        fail_at(file_of(run.applied), "write", lambda call: True, errno.ENOSPC)
        assert_same_steps(stack_steps(run.model), stack_without_plan(HABIT))
        swap = run.applied.stats.swap
    assert swap.num_failed > 0 and swap.num_out > 0 and swap.host_high_water_bytes > 0


DISK_FIRST = Plan("named", (Rule(".*", SWAP), Rule("input", SWAP, tier="disk")))


@pytest.mark.parametrize("step", [1, 1500, 4096, 5000])
def test_short_writes_and_reads_are_finished(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    least = 4096  # less than a block is no progress with direct I/O

    def short(part: memoryview) -> memoryview:
        return part[: max(least, len(part) - step)] if len(part) > least else part

    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: min(write(fd, part, at), len(short(part))))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: min(read(fd, parts, at), len(short(parts[0]))))
    with seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, regions=REGIONS, verify="always") as run:
        inputs = features(300, 8)
        planned, unplanned = (each(inputs).sum() for each in (run.model, small_stack(HABIT)))
        planned.backward()
        unplanned.backward()
        mine, theirs = ({n: p.grad for n, p in each.named_parameters()} for each in (run.model, small_stack(HABIT)))
        small_stack(HABIT).zero_grad(set_to_none=True)
    assert_same_tensors(mine, theirs)
    assert run.swapper.counters.num_in > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_fails_names_file_offset_and_op(kind: str, tmp_path: Path) -> None:
    for position in range(4):
        with seeded_plan(
            small_stack(HABIT), EVERYTHING, tmp_path, seed=position, kinds=(kind,), regions=REGIONS
        ) as run:
            fail_at(file_of(run.applied), "read", lambda call, at=position: call == at, errno.EIO)
            loss = run.model(features(4, 8)).sum()
            run.schedule.run_all()
            run.swapper.begin_call("nothing")
            with pytest.raises(SwapError, match=r"blocks\.[01] cannot be read back") as caught:
                loss.backward()
            message = str(caught.value)
            assert str(tmp_path) in message and "offset" in message and os.strerror(errno.EIO) in message
            assert any(path in message for path in ("linear.addmm", "sin", "cos", "exp", "input", "mul", "mm"))
            del loss, caught
            assert_same_steps(stack_steps(run.model), stack_without_plan(HABIT), "a new step")


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_15_a_file_that_changed_is_found(kind: str, tmp_path: Path) -> None:
    with seeded_plan(
        small_stack(HABIT), EVERYTHING, tmp_path, kinds=(kind,), laziness=0.0, regions=REGIONS, verify="always"
    ) as run:
        loss = run.model(features(4, 8)).sum()
        run.schedule.run_all()
        run.swapper.begin_call("nothing")
        file = file_of(run.applied)
        noise = torch.full((2**20 + 4096,), 7, dtype=torch.uint8)
        address = -(-noise.data_ptr() // 4096) * 4096
        file.write(address, 2**20, [Range(0, 2**20)])
        with pytest.raises(SwapError, match=r"came back .* with other bytes"):
            loss.backward()


@pytest.mark.parametrize("kinds", [("disk",), ("staged",), ("host",), ("host", "disk")], ids="-".join)
def test_a_limit_that_is_too_small_saves_and_says_so_once(kinds: tuple[str, ...], tmp_path: Path) -> None:
    with (
        warnings.catch_warnings(record=True) as caught,
        seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, kinds=kinds, regions=REGIONS, limit=0) as run,
    ):
        warnings.simplefilter("always")
        assert_same_steps(stack_steps(run.model), stack_without_plan(HABIT))
        swap = run.applied.stats.swap
    assert len(told(caught)) == 1 and "no room is left" in told(caught)[0]
    assert swap.num_no_room > 0 and swap.bytes_no_room > 0 and swap.num_out == 0


@pytest.mark.parametrize("kind", ["disk", "staged", "host"])
def test_what_finds_room_is_swapped_and_the_rest_is_saved(kind: str, tmp_path: Path) -> None:
    """A host copy of 1 MiB fits twice into 2 MiB, one on disk once into 1 MiB."""
    model, inputs = small_stack(HABIT), features(2**15, 8)
    limit = 2**22 if kind == "host" else 2**21
    with (
        pytest.warns(SwapWarning, match="no room is left"),
        seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), regions=REGIONS, limit=limit) as run,
    ):
        for _ in range(3):
            gradients = []
            for each in (run.model, model):
                each.zero_grad(set_to_none=True)
                each(inputs).square().mean().backward()
                gradients.append({name: parameter.grad for name, parameter in each.named_parameters()})
            assert_same_tensors(*gradients)
        model.zero_grad(set_to_none=True)
        swap = run.applied.stats.swap
    assert swap.num_out > 0 and swap.num_no_room > 0
    tier = run.swapper._tiers["host" if kind == "host" else "disk"]
    assert tier.usage().high_water_bytes <= tier.usage().reserved_bytes <= limit


def test_marks_of_a_range_that_was_too_small_are_not_forgotten(tmp_path: Path) -> None:
    """A large request that fails empties the queue of ranges whose copies still run; the next one gets such a range."""

    class Running:
        def has_passed(self) -> bool:
            return False

    pool, mark = SlabPool(2**21, pinned=False), Running()
    ranges, marks = pool.allocate(2**20)
    assert ranges is not None and marks == []
    pool.free(ranges, mark)  # type: ignore[arg-type]
    assert pool.allocate(2**22) == (None, [])
    ranges, marks = pool.allocate(2**21)
    assert ranges is not None and marks == [mark]


@pytest.mark.parametrize("fault", ["missing", "a file", "not writable"])
def test_a_directory_that_cannot_be_used_is_refused_before_anything_is_touched(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "scratch"
    if fault == "a file":
        directory.write_text("here")
    elif fault == "not writable":
        directory.mkdir()
        opens = os.open

        def refuse(path: Any, *arguments: Any, **options: Any) -> int:
            if str(path).startswith(str(directory)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opens(path, *arguments, **options)

        monkeypatch.setattr(os, "open", refuse)
    model = small_stack(HABIT)
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    with pytest.raises(ApplyError, match=r"memory\.disk_path .* cannot be used") as caught:
        apply(model, EVERYTHING, regions=REGIONS, memory={"disk_path": str(directory)})
    assert str(directory) in str(caught.value)
    assert {name: vars(module) for name, module in model.named_modules()} == before
    with apply(model, "none", regions=REGIONS):
        pass


def test_a_host_tier_on_the_cpu_is_refused() -> None:
    named = Plan("named", (Rule(".*", SWAP, tier="host"),))
    for plan, memory in ((EVERYTHING, {"tier": "host"}), (named, {})):
        with pytest.raises(ApplyError, match=r"'host'.*allowed on the CPU: disk"):
            apply(small_stack(HABIT), plan, regions=REGIONS, memory=memory)


def test_an_unknown_tier_is_a_fault_of_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"memory\.tier|tier"):
        apply(small_stack(HABIT), EVERYTHING, regions=REGIONS, memory={"tier": "tape"})


def test_memory_that_cannot_be_pinned_is_pageable_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("cannot lock memory\nC++ stack")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    memory = HostMemory()
    with pytest.warns(UserWarning, match=r"cannot be pinned any further \(cannot lock memory\)") as caught:
        pool = SlabPool(2**23)
        assert pool.allocate(2**21)[0] is not None and pool.allocate(2**21)[0] is not None
        assert memory.empty(100).numel() == memory.empty(100).numel() == 100
    assert len(caught) == 2, "one of the pool, one of the other memory"


@pytest.mark.parametrize("kind", ["host", "staged"])
def test_no_host_memory_at_all_closes_the_tier(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostMemory, size: int) -> Tensor:
        raise RuntimeError("can't allocate memory\nstack")

    monkeypatch.setattr(HostMemory, "empty", refuse)
    with (
        pytest.warns(SwapWarning, match="is closed.*no host memory: can't allocate memory;") as caught,
        seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, kinds=(kind,), regions=REGIONS) as run,
    ):
        assert_same_steps(stack_steps(run.model), stack_without_plan(HABIT))
    assert len(told(list(caught))) == 1


REAL_LIMIT = """
import resource, sys, warnings
import torch
from torch import nn
from actmem import apply
from actmem.planning import Action, Plan, Rule
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)])
inputs = torch.randn(1024, 256)

def gradients():
    model.zero_grad()
    model(inputs).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]

expected = gradients()
memory = {"disk_path": sys.argv[1], "min_swap_bytes": 0, "verify": "always"}
for limit in (3 * 2**20, 2**20):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 3 * 2**20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with apply(model, Plan("all", (Rule(".*", Action.SWAP),)), regions=list("0123"), memory=memory) as applied:
            for _ in range(3):
                assert all(map(torch.equal, gradients(), expected))
    swap = applied.stats.swap
    print(swap.num_begun > 0, len(caught), *[each.message for each in caught])
"""


def test_a_real_limit_on_file_sizes_closes_the_tier(tmp_path: Path) -> None:
    """Once when some storages have found room, and once with the first."""
    done = subprocess.run(
        [sys.executable, "-c", REAL_LIMIT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    some, none = done.stdout.splitlines()
    assert some.startswith("True 1 the swap tier disk is closed") and os.strerror(errno.EFBIG) in some
    assert none.startswith("False 1 the swap tier disk is closed") and os.strerror(errno.EFBIG) in none


def test_a_scratch_directory_in_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actmem.runtime.swap import scratch_file

    mounts = tmp_path / "mounts"
    mounts.write_text(f"none / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n")
    monkeypatch.setattr(scratch_file, "_MOUNTS", mounts)
    with pytest.warns(UserWarning, match="lies in memory"):
        apply(small_stack(HABIT), EVERYTHING, regions=REGIONS, memory={"disk_path": str(tmp_path)}).remove()


def test_a_whole_model_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    with (
        pytest.warns(SwapWarning, match="tier disk is closed") as caught,
        seeded_plan(tiny("dense"), "layer-swap", tmp_path) as run,
    ):
        fail_at(file_of(run.applied), "write", lambda call: call > 20, errno.ENOSPC)
        assert_same_steps(tiny_steps(run.model, "dense"), without_plan("dense"))
    assert len(told(list(caught))) == 1


FORKED = """
import os, sys, warnings
import torch
from torch import nn
from actmem import SwapError, apply
torch.set_num_threads(1)
warnings.simplefilter("ignore")
model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
applied = apply(model, "layer-swap", regions=["0"], memory={"min_swap_bytes": 0, "disk_path": sys.argv[1]})
inputs = torch.randn(64, 64, requires_grad=True)
def gradient():
    model.zero_grad()
    model(inputs).sum().backward()
    return model[0][0].weight.grad.clone()
expected = gradient()
child = os.fork()
for _ in range(20):
    assert torch.equal(gradient(), expected)
if child:
    assert os.waitpid(child, 0)[1] == 0
print("same")
"""


def test_a_forked_process_does_not_write_into_its_parents_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["same", "same"], done.stderr
