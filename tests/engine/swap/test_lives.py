"""Graphs are kept, shared, cut short and thrown away while copies are under way: nothing is lost, nothing is left."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Outcome,
    Stack,
    assert_same_steps,
    assert_same_tensors,
    block_names,
    features,
    gradients_of,
    planned_copy,
    stack_steps,
    token_batch,
    training_step,
    two_blocks,
)
from swapped_runs import (
    EVERYTHING,
    HABITS,
    INPUTS,
    RECOMPUTE,
    SWAP,
    SwapChecks,
    passes_its_input_on,
    seeded_plan,
    small_stack,
    stack_without_plan,
    tiny,
)
from torch import Tensor, nn

from actmem.errors import InPlaceEditError
from actmem.planning import Plan, Rule
from actmem.runtime.learning import Script
from actmem.runtime.swap.disk import DiskTier
from actmem.runtime.swap.storage import SwappedStorage

HABIT = "one_storage_many_readers"
REGIONS = ["blocks.0", "blocks.1"]
KINDS = ("disk", "host", "staged")
SHAPE = (4, 8)


def inputs_of(number: int) -> Tensor:
    return features(*SHAPE, seed=number).requires_grad_()


def two_forwards_before_one_backward(model: nn.Module, number: int) -> Outcome:
    first, second = model(inputs_of(number)).square().mean(), model(inputs_of(number + 1)).sin().mean()
    (first + second).backward()
    return gradients_of(model)


def backward_in_the_order_of_the_forwards(model: nn.Module, number: int) -> Outcome:
    losses = [model(inputs_of(number + each)).square().mean() for each in range(3)]
    for loss in losses:
        loss.backward()
    return gradients_of(model)


def one_forward_one_backward(model: nn.Module, number: int) -> Outcome:
    """As a pipeline does it: the next forward before the last backward."""
    pending = [model(inputs_of(number)).square().mean()]
    for each in range(3):
        pending.append(model(inputs_of(number + each)).square().mean())
        pending.pop(0).backward()
    pending.pop().backward()
    return gradients_of(model)


def accumulated_gradients(model: nn.Module, number: int) -> Outcome:
    for each in range(3):
        model(inputs_of(number + each)).square().mean().backward()
    return gradients_of(model)


def retained_twice(model: nn.Module, number: int) -> Outcome:
    loss = model(inputs_of(number)).square().mean()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(model)


def gradient_of_a_part(model: nn.Module, number: int) -> Outcome:
    loss = model(inputs_of(number)).square().mean()
    weight = model.blocks[1].linear.weight
    (part,) = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    return gradients_of(model) | {"part": part}


def double_backward(model: nn.Module, number: int) -> Outcome:
    inputs = inputs_of(number)
    (gradient,) = torch.autograd.grad(model(inputs).square().mean(), inputs, create_graph=True)
    gradient.square().sum().backward()
    return gradients_of(model) | {"gradient": gradient.detach()}


def exception_in_the_forward(model: nn.Module, number: int) -> Outcome:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[1].linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(inputs_of(number))
    handle.remove()
    return accumulated_gradients(model, number)


def exception_between_forward_and_backward(model: nn.Module, number: int) -> Outcome:
    def interrupted() -> None:
        loss = model(inputs_of(number)).square().mean()
        raise ValueError(f"on purpose: {loss.item()}")

    with pytest.raises(ValueError, match="on purpose"):
        interrupted()
    return accumulated_gradients(model, number)


def exception_in_the_backward(model: nn.Module, number: int) -> Outcome:
    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    hidden = model.blocks[0](inputs_of(number))
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model.blocks[1](hidden).sum().backward()
    model.zero_grad(set_to_none=True)
    return accumulated_gradients(model, number)


def backward_that_never_comes(model: nn.Module, number: int) -> Outcome:
    model(inputs_of(number))
    loss = model(inputs_of(number)).sum()
    outcome = accumulated_gradients(model, number)
    del loss
    return outcome


def gradient_inside_the_forward(model: nn.Module, number: int) -> Outcome:
    """A region whose forward takes a gradient of its own, as force fields do."""
    inputs = inputs_of(number)
    hidden = model.blocks[0](inputs)
    (inner,) = torch.autograd.grad(hidden.square().sum(), inputs, create_graph=True)
    model.blocks[1](hidden + inner).square().mean().backward()
    return gradients_of(model)


LIVES = (
    two_forwards_before_one_backward,
    backward_in_the_order_of_the_forwards,
    one_forward_one_backward,
    accumulated_gradients,
    retained_twice,
    gradient_of_a_part,
    double_backward,
    exception_in_the_forward,
    exception_between_forward_and_backward,
    exception_in_the_backward,
    backward_that_never_comes,
    gradient_inside_the_forward,
)
PLANS = {
    "all": EVERYTHING,
    "inputs": INPUTS,
    "mixed": Plan("mixed", (Rule(".*", RECOMPUTE), Rule(r"linear\..*|input", SWAP))),
}


def compare(run: SwapChecks, twin: nn.Module, life: Callable[[nn.Module, int], Outcome]) -> None:
    """Two rounds of a life with and without the plan, one that learns and one that follows."""
    for number in range(2):
        outcomes = []
        for each in (run.model, twin):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(number)
            outcomes.append(life(each, number))
        assert_same_tensors(*outcomes, f"round {number}: ")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("life", LIVES, ids=lambda each: each.__name__)
def test_invariant_05_state_belongs_to_the_call(
    life: Callable[[nn.Module, int], Outcome], plan: str, tmp_path: Path
) -> None:
    model = small_stack("passes_its_input_on" if life is double_backward else HABIT)
    num_out = 0
    for seed, kind in enumerate(KINDS if plan == "all" else ("disk", "host")):
        with seeded_plan(
            model, PLANS[plan], tmp_path, seed=seed, kinds=(kind,), regions=REGIONS, verify="always", prefetch=seed % 3
        ) as run:
            compare(run, copy.deepcopy(model), life)
            num_out += run.applied.stats.swap.num_out
    assert num_out > 0


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_05_a_graph_dropped_while_copies_are_pending_frees_its_place(kind: str, tmp_path: Path) -> None:
    with seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, kinds=(kind,), laziness=1.0, regions=REGIONS) as run:
        tier = run.swapper._tiers["host" if kind == "host" else "disk"]
        for _ in range(5):
            loss = run.model(inputs_of(0)).sum()
            assert tier.usage().used_bytes > 0
            del loss
            run.schedule.run_all()
            if kind == "host":
                tier.pool.allocate(0)  # type: ignore[attr-defined]
            assert tier.usage().used_bytes == 0
        reserved = tier.usage().reserved_bytes
    assert reserved <= 2**21


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_11_a_plan_taken_off_between_forward_and_backward(kind: str, tmp_path: Path) -> None:
    model = small_stack(HABIT)
    twin = copy.deepcopy(model)
    with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), regions=REGIONS) as run:
        losses = [each(inputs_of(0)).square().mean() for each in (run.model, twin)]
        run.applied.remove()
        for loss in losses:
            loss.backward()
        assert_same_tensors(gradients_of(run.model), gradients_of(twin))
    assert_same_steps(stack_steps(run.model, num_steps=1), stack_steps(twin, num_steps=1))


def test_invariant_11_copies_of_a_model_have_no_plan(tmp_path: Path) -> None:
    model = small_stack(HABIT)
    with seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS) as run:
        stack_steps(run.model, num_steps=1)
        twin = copy.deepcopy(run.model)
        before = run.applied.stats.swap
        twin(inputs_of(0)).sum().backward()
        assert run.applied.stats.swap == before


# In-place edits

Edit = Callable[[Any, Tensor], Tensor]


def edit_of_a_saved_tensor(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).tanh()
    out = inner.sin()
    if block.edits:
        inner.add_(1)
    return out


def edit_of_a_view_of_a_saved_tensor(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).tanh()
    out = inner.sin()
    if block.edits:
        inner[1:].zero_()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", [edit_of_a_saved_tensor, edit_of_a_view_of_a_saved_tensor], ids=lambda e: e.__name__)
def test_invariant_06_edits_of_swapped_tensors_are_refused(edit: Edit, kind: str, tmp_path: Path) -> None:
    """Both in a call that follows what an earlier one did without the edit, and in one that learns."""
    for learned in (True, False):
        model = two_blocks(edit, edits=False)
        with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), regions=REGIONS) as run:
            if learned:
                run.model(inputs_of(0)).sum().backward()
            for each in (run.model, model):
                for block in each.blocks:
                    block.edits = True
            for each, error in ((run.model, InPlaceEditError), (model, RuntimeError)):
                with pytest.raises(error, match="modified by an inplace operation"):
                    each(inputs_of(0)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_06_edits_outside_the_region_are_refused(kind: str, tmp_path: Path) -> None:
    model = Stack(FunctionBlock(lambda block, hidden: block.linear(hidden).exp()))
    with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), regions=["blocks.0"]) as run:
        for _ in range(3):
            for each, error in ((run.model, InPlaceEditError), (model, RuntimeError)):
                out = each(inputs_of(0))
                with torch.no_grad():
                    out.mul_(2)
                with pytest.raises(error, match="modified by an inplace operation"):
                    out.sum().backward()
        assert_same_steps(stack_steps(run.model), stack_steps(copy.deepcopy(model)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("laziness", [0.0, 1.0], ids=["away", "pending"])
def test_invariant_03_a_legal_edit_of_a_swapped_source(laziness: float, kind: str, tmp_path: Path) -> None:
    model = small_stack("input_edited")
    with seeded_plan(
        model, INPUTS, tmp_path, kinds=(kind,), laziness=laziness, regions=block_names(model), verify="always"
    ) as run:
        assert_same_steps(stack_steps(run.model), stack_without_plan("input_edited"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_other_memory_leaves_pending_copies_alone(kind: str, tmp_path: Path) -> None:
    """Most swapped tensors are gone as objects by the time of an edit, which says nothing about their memory."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden).view(2, 2, 8).sin().view(4, 8).cos()
        torch.zeros(3).add_(1)
        return inner

    model = two_blocks(forward)
    with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), laziness=1.0, regions=REGIONS) as run:
        for _ in range(3):
            loss = run.model(inputs_of(0)).sum()
            run.schedule.run_all()
            run.swapper.begin_call("nothing")
            run.swapper.begin_call("nothing")
            storages = alive_storages(run)
            assert storages and all(each.has_copy and each.data is None for each in storages)
            loss.backward()
            del storages


def alive_storages(run: SwapChecks) -> list[SwappedStorage]:
    """What is swapped now."""
    found = [storage() for call in run.swapper._calls.values() for storage in call.storages]
    return [each for each in found if each is not None]


# What stays, and for how long


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("habit", [each.__name__ for each in HABITS] + ["shared_input"])
def test_nothing_is_here_after_its_last_use(habit: str, plan: str, kind: str, tmp_path: Path) -> None:
    """Each use is counted once: after a pass over a retained graph all that was swapped is away again."""
    model = small_stack(habit)
    with seeded_plan(
        model, PLANS[plan], tmp_path, kinds=(kind,), laziness=0.0, regions=block_names(model), prefetch=2
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


# Nothing is left


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


# What an adversary found


def conjugate(block: Any, hidden: Tensor) -> Tensor:
    turned = torch.complex(hidden, block.linear(hidden))
    return (turned * turned.conj() + turned.conj() @ turned.mT).abs()


def test_invariant_01_a_conjugate_view_is_not_taken_for_what_it_views(tmp_path: Path) -> None:
    model = Stack(FunctionBlock(conjugate))
    with seeded_plan(model, Plan("all", (Rule(".*", SWAP),)), tmp_path, regions=["blocks.0"]) as run:
        for _ in range(3):
            assert_same_steps(
                [training_step(run.model, lambda each: each(features(8, 8).requires_grad_()).sum())],
                [training_step(model, lambda each: each(features(8, 8).requires_grad_()).sum())],
            )


def halves(block: Any, hidden: Tensor) -> Tensor:
    first, second = torch.unsafe_chunk(block.linear(hidden) * 1, 2, dim=-1)
    if next(block.turns):
        first.mul_(2)
        left = first.sin()
        second.mul_(3)
        return left * second.sin()
    return first.sin() * second.sin()


@pytest.mark.parametrize("seed", range(4))
def test_invariant_06_views_that_count_versions_alone_are_told_apart(seed: int, tmp_path: Path) -> None:
    turns = [False, True, True, True]
    model = Stack(FunctionBlock(halves))
    with seeded_plan(model, Plan("all", (Rule(".*", SWAP),)), tmp_path, seed=seed, regions=["blocks.0"]) as run:
        model.blocks[0].turns, run.model.blocks[0].turns = iter(turns), iter(turns)
        for _ in turns:
            assert_same_steps(
                [training_step(run.model, lambda each: each(features(8, 8).requires_grad_()).sum())],
                [training_step(model, lambda each: each(features(8, 8).requires_grad_()).sum())],
            )


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
