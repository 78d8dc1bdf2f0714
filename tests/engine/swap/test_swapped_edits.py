"""In-place edits and odd views of tensors that are away, or on their way."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    stack_steps,
    training_step,
    two_blocks,
)
from seeded import KINDS
from swapped_runs import (
    EVERYTHING,
    INPUTS,
    REGIONS,
    SWAP,
    alive_storages,
    inputs_of,
    seeded_plan,
    small_stack,
    stack_without_plan,
)
from torch import Tensor

from actmem.errors import InPlaceEditError
from actmem.planning import Plan, Rule

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
