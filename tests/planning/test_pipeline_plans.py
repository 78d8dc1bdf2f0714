"""Plans for pipelines: a budget holds on every rank, and a rank that has slack pays nothing."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from actmem.config.loading import parse_config
from actmem.config.schema import RunConfig
from actmem.errors import PlanError
from actmem.planning.pipeline_planner import PipelinePlanner
from actmem.planning.plan import Action
from actmem.training.budget import describe, pipeline_planner_of, plan_run
from actmem.training.traced import trace_pipeline

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def run_of(schedule: str = "1F1B", *, ranks: int = 2, layers: int = 8, **others: object) -> RunConfig:
    return parse_config(
        {
            "model": {"name": "qwen3-tiny", "config": {"num_hidden_layers": layers, "tie_word_embeddings": False}},
            "data": {"path": ["none"], "sequence_length": 512},
            "train": {"micro_batch_size": 8},
            "parallel": {"pp_size": ranks, "pp_schedule": schedule, "pp_microbatches": 8},
            "hardware": "h100-sxm",
            **others,
        }
    )


@cache
def planner_of(schedule: str = "1F1B", ranks: int = 2, layers: int = 8) -> PipelinePlanner:
    run = run_of(schedule, ranks=ranks, layers=layers)
    return pipeline_planner_of(run, trace_pipeline(run))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_budget_holds_on_every_rank(schedule: str) -> None:
    planner = planner_of(schedule, layers=4)
    found = planner.within(0.6)
    for rank, alone in zip(found.simulation.ranks, found.ranks, strict=True):
        assert rank.peak_bytes <= alone.budget_bytes
    # what is written down is what was simulated
    assert planner.simulate(found.plan).peak_bytes == found.simulation.peak_bytes
    assert found.bound_seconds <= found.simulation.seconds


def test_a_rank_with_slack_pays_nothing() -> None:
    """Under 1F1B each stage has one micro-batch less under way than the one before it."""
    planner = planner_of(ranks=4)
    peaks = [rank.peak_bytes for rank in planner.unplanned.ranks[:-1]]  # the last one has the loss
    assert all(before > after for before, after in pairwise(peaks))
    found = planner.within((peaks[1] + peaks[2]) // 2)
    assert [bool(rank.plan.rules) for rank in found.ranks[:3]] == [True, True, False]
    assert found.simulation.ranks[2].replay_seconds == found.simulation.ranks[2].swapped_bytes == 0
    named = {layer for rule in found.plan.rules if rule.action is not Action.SAVE for layer in rule.layers or ()}
    assert named <= {*planner.pipeline.layers_of(0), *planner.pipeline.layers_of(1), *planner.pipeline.layers_of(3)}


def test_a_smaller_budget_is_no_faster() -> None:
    planner = planner_of("Interleaved1F1B")
    seconds = [planner.within(share).simulation.seconds for share in (0.9, 0.6, 0.3)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_what_the_program_believes_is_what_the_simulation_says(schedule: str) -> None:
    """Within 1 %, for plans that swap nothing."""
    for rank in planner_of(schedule).ranks:
        choice = rank._search.solver.solve(rank.budget_of(0.5), mood="plain")
        assert choice is not None
        simulated = rank.simulator.run([option.plan for option in choice.options])
        assert simulated.peak_bytes == pytest.approx(choice.peak_bytes, rel=0.01)


def test_every_rank_that_cannot_meet_a_budget_says_so() -> None:
    with pytest.raises(PlanError) as caught:
        planner_of().within(2**20)
    lines = str(caught.value).splitlines()
    assert [line.partition(",")[0] for line in lines] == ["rank 0 of the pipeline", "rank 1 of the pipeline"]
    assert all("the least possible is" in line and "more parallel.pp_microbatches" in line for line in lines)


def test_swapped_bytes_are_those_that_the_engine_swaps() -> None:
    """What is needed at once stays: all of the last stage under 1F1B."""
    planner = PipelinePlanner(planner_of().simulator, min_swap_bytes=0)
    first, last = planner.simulate("attention-swap").ranks
    assert first.swapped_bytes > last.swapped_bytes == 0


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_what_a_peak_is_made_of_adds_up(schedule: str) -> None:
    for rank in planner_of(schedule).unplanned.ranks:
        assert min(rank.peak.bytes_by_use.values()) > 0
        assert rank.peak.bytes_by_use["gradients"] > 0


def test_a_budget_above_everything_is_no_plan() -> None:
    found = planner_of().within(2**40)
    assert found.plan.rules == ()
    assert found.added_share == 0.0


def test_waiting_is_told_from_work() -> None:
    """With as many micro-batches as stages, GPipe has ranks wait for about half of the time."""
    few = run_of(
        "GPipe", train={"micro_batch_size": 2}, parallel={"pp_size": 2, "pp_schedule": "GPipe", "pp_microbatches": 2}
    )
    bubble = pipeline_planner_of(few, trace_pipeline(few)).unplanned.bubble_share
    assert 0.2 < bubble < 0.5
    assert planner_of("GPipe").unplanned.bubble_share < bubble


def test_a_plan_for_a_run_says_what_each_rank_takes() -> None:
    told = describe(plan_run(run_of(memory_budget=0.5)))
    assert "rank 0" in told
    assert "rank 1" in told
