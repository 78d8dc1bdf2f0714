"""What may leave, what is here for how long, and that nothing is left in the end."""

from __future__ import annotations

import copy
import gc
import os
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Stack,
    assert_same_steps,
    block_names,
    features,
    planned_copy,
    stack_steps,
    token_batch,
    two_blocks,
)
from seeded import KINDS
from swapped_runs import (
    EVERYTHING,
    HABIT,
    HABITS,
    RECOMPUTE,
    REGIONS,
    SHAPE,
    STACK_PLANS,
    SWAP,
    alive_storages,
    inputs_of,
    passes_its_input_on,
    seeded_plan,
    small_stack,
    tiny,
)
from torch import Tensor, nn

from actmem.planning import Plan, Rule
from actmem.runtime.learning import Script
from actmem.runtime.swap.disk import DiskTier


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", STACK_PLANS)
@pytest.mark.parametrize("habit", [each.__name__ for each in HABITS] + ["shared_input"])
def test_nothing_is_here_after_its_last_use(habit: str, plan: str, kind: str, tmp_path: Path) -> None:
    """Each use is counted once: after a pass over a retained graph all that was swapped is away again."""
    model = small_stack(habit)
    with seeded_plan(
        model, STACK_PLANS[plan], tmp_path, kinds=(kind,), laziness=0.0, regions=block_names(model), prefetch=2
    ) as run:
        for _ in range(3):
            loss = run.model(inputs_of(0)).sum()
            run.schedule.run_all()
            for _ in range(2):
                loss.backward(retain_graph=True)
                run.schedule.run_all()
                run.swapper._settle()
                here = [each for each in alive_storages(run) if each.has_copy and each.data is not None]
                assert [(each.path, each.done, each.uses) for each in here] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("habit", [each.__name__ for each in HABITS])
def test_memory_of_what_is_away_is_free(habit: str, kind: str, tmp_path: Path) -> None:
    """No handle, view or source keeps the first memory of a storage once it has left, whether learned or known."""
    model = small_stack(habit)
    with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), laziness=0.0, regions=REGIONS) as run:
        for _ in range(3):
            inputs = inputs_of(0)
            loss = run.model(inputs).sum()
            run.schedule.run_all()
            run.swapper.begin_call("nothing")
            run.swapper.begin_call("nothing")
            away = [each for each in alive_storages(run) if each.has_copy]
            assert away and all(each.data is None for each in away)
            held = [each for each in away if not each.reference.expired()]  # type: ignore[attr-defined]
            assert [each.path for each in held if each.identity != inputs.untyped_storage()._cdata] == []
            loss.backward()


def test_nothing_is_here_after_its_last_use_where_experts_run_one_by_one(tmp_path: Path) -> None:
    plan = Plan("mixed", (Rule(".*", RECOMPUTE), Rule(r".*mm.*|input", SWAP)))
    with seeded_plan(tiny("eager"), plan, tmp_path, laziness=0.0) as run:
        for number in range(5):
            loss = run.model(**token_batch(number, length=4)).loss
            run.schedule.run_all()
            loss.backward(retain_graph=True)
            run.schedule.run_all()
            run.swapper._settle()
            here = [each for each in alive_storages(run) if each.has_copy and each.data is not None]
            assert [(each.path, each.done, each.uses) for each in here] == []
        assert sum(region.num_streamed_calls for region in run.applied.stats.regions) > 0


class Offered:
    """What is given to a tier to be copied."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.storages: list[int] = []
        offload = DiskTier.offload

        def spy(tier: DiskTier, data: Tensor) -> Any:
            self.storages.append(data.untyped_storage().data_ptr())
            return offload(tier, data)

        patch.setattr(DiskTier, "offload", spy)


def parameters_everywhere(block: Any, hidden: Tensor) -> Tensor:
    transposed = block.linear.weight.t()
    picked = torch.where(block.mask, hidden, hidden * 2)
    order = hidden.detach().argsort(-1)
    table = block.table[order.sum() % 2]
    return (picked @ transposed).gather(-1, order).exp() * table * block.linear.bias.view(1, 8)


def test_invariant_08_parameters_buffers_and_integers_are_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_blocks(parameters_everywhere, mask=torch.arange(8) % 2 == 0, table=torch.rand(2, 8))
    offered = Offered(monkeypatch)
    with seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS, verify="always") as run:
        owned = {each.untyped_storage().data_ptr() for each in (*run.model.parameters(), *run.model.buffers())}
        assert_same_steps(stack_steps(run.model), stack_steps(copy.deepcopy(model)))
    assert offered.storages and owned.isdisjoint(offered.storages)


def test_invariant_08_a_view_of_a_parameter_as_input_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learned from a call with an activation holds for a call with a learned prompt, a view of a parameter."""
    model = two_blocks(passes_its_input_on)
    model.prompt = nn.Parameter(features(2, *SHAPE))
    offered = Offered(monkeypatch)
    with seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS) as run:
        stack_steps(run.model, num_steps=1)
        run.model(run.model.prompt[0]).sum().backward()
        assert run.model.prompt.untyped_storage().data_ptr() not in offered.storages
    assert offered.storages


@pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")
def test_invariant_09_an_order_does_not_pass_to_the_next_storage_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rules are asked at each op, outputs that nobody saves die young, and others get their ids."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        for _ in range(next(block.counts)):
            hidden = hidden + 1
        for _ in range(8):
            (hidden.detach() * 3).sum()
            kept = nn.functional.dropout(hidden, 0.5)  # random: always saved
            hidden = hidden + kept.exp() * 0.01
        return block.linear(hidden)

    model = Stack(FunctionBlock(forward))
    model.blocks[0].counts = iter([1, 2, 3, 4, 5, 6])
    plan = Plan("swaps what dies", (Rule(r"mul(#\d*[02468])?", SWAP),))
    monkeypatch.setattr(Script, "watches_ops", True)  # else nobody notices that another number of ops has run
    offered = Offered(monkeypatch)
    with seeded_plan(model, plan, tmp_path, regions=["blocks.0"]) as run:
        run.model.blocks[0].counts = iter([1, 2, 3, 4, 5, 6])
        for _ in range(6):
            run.model(inputs_of(0)).sum().backward()
        assert run.applied.stats.regions[0].num_streamed_calls > 0
    assert offered.storages == []


def open_files() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("kind", "num_steps"), [("disk", 500), ("host", 100), ("staged", 100)])
def test_invariant_10_many_steps_end_where_they_began(kind: str, num_steps: int, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = Stack(FunctionBlock(passes_its_input_on))
        with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), regions=["blocks.0"]) as run:
            floors = []
            for step in range(num_steps):
                run.model(inputs_of(step % 4)).sum().backward()
                run.model.zero_grad(set_to_none=True)
                if (step + 1) % (num_steps // 5) == 0:
                    run.schedule.run_all()
                    run.swapper.begin_call("nothing")
                    usage = next(iter(run.swapper._tiers.values())).usage()
                    descriptors = open_files()
                    floors.append((len(gc.get_objects()), threading.active_count(), descriptors, usage.reserved_bytes))
            swap = run.applied.stats.swap
    finally:
        gc.enable()
    assert swap.num_out > num_steps
    first, *others = floors[1:]
    assert all(abs(each[0] - first[0]) < 40 and each[1:] == first[1:] for each in others), floors


def test_invariant_10_real_threads_and_file_do_not_grow(tmp_path: Path) -> None:
    planned, applied = planned_copy(small_stack(HABIT), EVERYTHING, regions=REGIONS, disk_path=str(tmp_path))
    gc.collect()
    gc.disable()
    try:
        floors = []
        with applied:
            for step in range(100):
                planned(inputs_of(step % 4)).sum().backward()
                planned.zero_grad(set_to_none=True)
                if step == 30:
                    tracemalloc.start()
                if step % 30 == 29:
                    floors.append((threading.active_count(), open_files()))
            current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert len(set(floors)) == 1, floors
    assert current < 200_000
    disk: Any = applied._engine.swapper._tiers["disk"]  # type: ignore[union-attr]
    assert os.fstat(disk.file._fd).st_size <= 2**21


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_10_a_swapper_dies_with_its_plan(kind: str, tmp_path: Path) -> None:
    """Its file, threads and pool go at once, not when the collector comes."""
    gc.collect()
    gc.disable()
    try:
        with seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, kinds=(kind,), regions=REGIONS) as run:
            stack_steps(run.model)
            parts = [run.swapper, *run.swapper._tiers.values()]
            gone = [weakref.ref(part) for each in parts for part in (each, getattr(each, "pool", run.swapper))]
            del parts
        del run
        assert [reference() for reference in gone if reference() is not None] == []
    finally:
        gc.enable()


def test_invariant_10_threads_end_with_their_plan(tmp_path: Path) -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("actmem")]

    gc.collect()
    planned, applied = planned_copy(small_stack(HABIT), EVERYTHING, regions=REGIONS, disk_path=str(tmp_path))
    stack_steps(planned)
    assert threads()
    ours = [each for each in threading.enumerate() if each.name.startswith("actmem")]
    applied.remove()
    del planned, applied
    for each in ours:
        each.join(timeout=5)
    assert not any(each.is_alive() for each in ours)
