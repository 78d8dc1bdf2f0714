"""Loss and gradients are bitwise equal whatever order copies run in, when they run, and whether there is room."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from planned_runs import assert_same_steps, block_names, planned_copy, stack_steps
from seeded import let_apply_use
from swapped_runs import (
    EVERYTHING,
    INPUTS,
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

from actmem.runtime.swap import disk, host
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.swapper import Swapper

SCALE = int(os.environ.get("ACTMEM_SCHEDULES", "1"))
"""How many times the usual number of schedules are tried."""

NUM_STACK_SEEDS = 5 * SCALE
NUM_MODEL_SEEDS = 2 * SCALE - 1

# Small regions often leave a random rule nothing to do, and small limits leave no room; both are said.
pytestmark = pytest.mark.filterwarnings(
    "ignore::actmem.runtime.NoEffectWarning", "ignore::actmem.runtime.swap.swapper.SwapWarning"
)

TIERS = (("disk",), ("host",), ("staged",), ("host", "disk"))


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


FAMILIES = ("dense", "grouped_mm", "eager")


@pytest.mark.parametrize("name", [*PLANS, "selective, swapped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_01_whole_models_in_any_order_of_copies(family: str, name: str, tmp_path: Path) -> None:
    num_out = bytes_in = num_overlapped = 0
    for seed in range(NUM_MODEL_SEEDS):
        for kinds in TIERS[::2] if seed % 2 == (family == "eager") else TIERS[1::2]:
            source = random.Random(f"{family} {name} {kinds} {seed}")
            with seeded_plan(
                tiny(family),
                tiny_plan(family, name),
                tmp_path,
                seed=source.randrange(2**32),
                kinds=kinds,
                laziness=0.0 if num_out == 0 else source.choice([0.6, 0.95]),
                verify=source.choice(["first", "off"]),
                prefetch=source.randint(0, 2),
                in_flight_limit=source.choice([2**31, 2**31, 4000]),
            ) as run:
                assert_same_steps(tiny_steps(run.model, family), tiny_without_plan(family), f"{kinds}, seed {seed}")
                swap = run.applied.stats.swap
            assert swap.num_begun > 0, kinds
            num_out, bytes_in = num_out + swap.num_out, bytes_in + swap.bytes_in
            num_overlapped += run.schedule.num_overlapped
            streamed = sum(region.num_streamed_calls for region in run.applied.stats.regions)
            assert (streamed > 0) == (family == "eager"), "experts run one by one leave the script"
    assert num_out > 0 and bytes_in > 0 and num_overlapped > 0


@pytest.mark.parametrize("name", ["layer-swap", "mixed", "selective, swapped"])
@pytest.mark.parametrize("family", ["dense", "eager"])
def test_invariant_01_whole_models_with_real_threads_and_a_real_file(family: str, name: str, tmp_path: Path) -> None:
    planned, applied = planned_copy(tiny(family), tiny_plan(family, name), disk_path=str(tmp_path))
    with applied:
        assert_same_steps(tiny_steps(planned, family), tiny_without_plan(family))
    swap = applied.stats.swap
    assert swap.num_begun > 0


@pytest.mark.parametrize("habit", STACKS)
def test_invariant_01_small_stacks_with_real_threads_and_a_real_file(habit: str, tmp_path: Path) -> None:
    model = small_stack(habit)
    planned, applied = planned_copy(model, EVERYTHING, regions=block_names(model), disk_path=str(tmp_path))
    with applied:
        assert_same_steps(stack_steps(planned), stack_without_plan(habit))
    assert applied.stats.swap.num_begun > 0


def test_invariant_01_several_real_threads_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SwapCounters()
    threads = [ThreadPoolExecutor(4) for _ in range(2)]
    tier = disk.DiskTier(tmp_path, None, counters, writer=threads[0], reader=threads[1])
    swapper = Swapper([tier], ["disk"], counters, prefetch=2, min_swap_bytes=0, in_flight_limit=2**31)
    let_apply_use(swapper, monkeypatch)
    for habit in STACKS:
        model = small_stack(habit)
        planned, applied = planned_copy(model, EVERYTHING, regions=block_names(model))
        with applied:
            assert_same_steps(stack_steps(planned), stack_without_plan(habit))
    for each in threads:
        each.shutdown()
    assert counters.num_begun > 0


@pytest.mark.parametrize("kinds", TIERS, ids="-".join)
def test_the_same_seed_runs_the_same_schedule(kinds: tuple[str, ...], tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        with seeded_plan(
            small_stack("views"), EVERYTHING, tmp_path, seed=5, kinds=kinds, regions=["blocks.0", "blocks.1"]
        ) as run:
            stack_steps(run.model)
            swap = run.applied.stats.swap
            counts.append((swap.num_out, swap.num_in, swap.num_withdrawn, swap.num_late, run.schedule.num_overlapped))
    assert counts[0] == counts[1]


class Sabotage:
    """Ways to break the swapper; the schedules must find each."""

    @staticmethod
    def source_goes_before_its_copy(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(host.HostTier, "wait", lambda self, mark: None)

    @staticmethod
    def bytes_are_read_before_they_came(patch: pytest.MonkeyPatch) -> None:
        def finish(self: Any) -> Any:
            data, self._data = self._data, None
            return data

        patch.setattr(host.HostReload, "finish", finish)

    @staticmethod
    def edits_go_unheard(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Swapper, "keep_contents", lambda self, storage: None)


SABOTAGES = {
    Sabotage.source_goes_before_its_copy: "host",
    Sabotage.bytes_are_read_before_they_came: "host",
    Sabotage.edits_go_unheard: "disk",
}


@pytest.mark.parametrize(("sabotage", "kind"), SABOTAGES.items(), ids=lambda each: getattr(each, "__name__", each))
def test_schedules_find_what_is_broken(
    sabotage: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(20):
            for habit in ("input_edited", "views"):
                with seeded_plan(
                    small_stack(habit),
                    INPUTS if habit == "input_edited" else EVERYTHING,
                    tmp_path,
                    seed=seed,
                    kinds=(kind,),
                    laziness=0.9,
                    verify="off",
                    regions=block_names(small_stack(habit)),
                ) as run:
                    assert_same_steps(stack_steps(run.model), stack_without_plan(habit))
