"""Loss and gradients are bitwise equal whatever order copies run in, when they run, and whether there is room."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from planned_runs import assert_same_steps, block_names, planned_copy, stack_steps
from swapped_runs import (
    EVERYTHING,
    PLANS,
    STACKS,
    random_plan,
    seeded_plan,
    small_stack,
    stack_paths,
    stack_without_plan,
    tiny,
    tiny_plan,
    tiny_steps,
    tiny_without_plan,
)

SCALE = int(os.environ.get("ACTMEM_SCHEDULES", "1"))
"""How many times the usual number of schedules are tried."""

NUM_STACK_SEEDS = 12 * SCALE
NUM_MODEL_SEEDS = 2 * SCALE

# Small regions often leave a random rule nothing to do, and small limits leave no room; both are said.
pytestmark = pytest.mark.filterwarnings(
    "ignore::actmem.runtime.NoEffectWarning", "ignore::actmem.runtime.swap.swapper.SwapWarning"
)

TIERS = (("disk",), ("host",), ("staged",), ("host", "disk"))
LIMITS = (None, 3 * 2**20)


@pytest.mark.parametrize("kinds", TIERS, ids="-".join)
@pytest.mark.parametrize("habit", STACKS)
def test_invariant_01_small_stacks_in_any_order_of_copies(habit: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = small_stack(habit)
    names = block_names(model)
    num_out = num_in = num_overlapped = 0
    for seed in range(NUM_STACK_SEEDS):
        source = random.Random(f"{habit} {kinds} {seed}")
        with seeded_plan(
            model,
            EVERYTHING if seed % 4 == 0 else random_plan(stack_paths(habit), source),
            tmp_path,
            seed=source.randrange(2**32),
            kinds=kinds,
            laziness=source.choice([0.0, 0.5, 0.9, 1.0]),
            regions=names,
            verify=source.choice(["always", "off"]),
            prefetch=source.randint(0, 2),
            in_flight_limit=source.choice([2**31, 2**31, 200, 1000]),
        ) as run:
            steps = stack_steps(run.model)
            assert_same_steps(steps, stack_without_plan(habit), f"seed {seed}")
            swap = run.applied.stats.swap
        num_out, num_in = num_out + swap.num_out, num_in + swap.num_in
        num_overlapped += run.schedule.num_overlapped
        assert swap.bytes_in <= swap.bytes_out * 4
    assert num_out > NUM_STACK_SEEDS and num_in > NUM_STACK_SEEDS
    assert num_overlapped > NUM_STACK_SEEDS
