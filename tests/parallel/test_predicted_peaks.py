"""What the simulator says of the memory of each rank, beside what real processes allocate."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import run_ranks
from torch import Tensor, distributed, nn

from actmem.config.loading import parse_config
from actmem.config.schema import RunConfig
from actmem.config.stages import layers_of_stages, num_stages, stages_of_rank
from actmem.graph import Graph
from actmem.memory import measure_peak
from actmem.models.building import build_model
from actmem.parallel import build_mesh, shard_tensors
from actmem.parallel.pipeline import Pipeline, StageShape, cut, layers_here
from actmem.planning.course import Costs
from actmem.planning.fates import fates_under
from actmem.planning.pipeline import PipelineGraph, PipelineSimulator
from actmem.planning.plan import RuleSet
from actmem.planning.policies import POLICIES as RULES
from actmem.planning.simulation import Conditions, LayerPlan
from actmem.runtime import Applied, apply
from actmem.runtime.pipeline import PipelineSwaps
from actmem.training.loss import next_token_loss, plain, states_loss
from actmem.training.packing import Batch
from actmem.training.traced import trace_pipeline, trace_step

pytestmark = pytest.mark.ranks

NUM_MICROBATCHES, LENGTH, HIDDEN, NUM_LAYERS = 6, 64, 64, 8
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
POLICIES = ("none", "selective", "full")
EXACT = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
PARTED = ("InterleavedZeroBubble",)
"""Schedules that part a backward pass: which gradients autograd keeps between the parts is known roughly only."""
SCALARS = 1024
CASES = [(schedule, policy) for schedule in (*EXACT, *PARTED) for policy in POLICIES]
LAYOUTS = {"tensors": {"tp_size": 2}, "sequence": {"tp_size": 2, "sequence_parallel": True}}
SPREAD = [(layout, policy) for layout in LAYOUTS for policy in POLICIES]
CPU = torch.device("cpu")


def config(schedule: str) -> RunConfig:
    return parse_config(
        {
            "model": {"config": FIELDS},
            "data": {"path": ["none"], "sequence_length": LENGTH},
            "train": {"micro_batch_size": NUM_MICROBATCHES},
            "parallel": {"pp_size": 2, "pp_schedule": schedule, "pp_microbatches": NUM_MICROBATCHES},
        }
    )


def training_step(rank: int, schedule: str, policy: str, stack: ExitStack) -> Callable[[], None]:
    run = config(schedule)
    cuts, mine = layers_of_stages(run.parallel, NUM_LAYERS), stages_of_rank(run.parallel, rank)
    model = build_model(run.model, seed=0)
    modules = {index: cut(model, *cuts[index]) for index in mine}
    stages = nn.ModuleList(modules.values())
    stack.enter_context(
        apply(stages, policy, memory={"verify": "off"}, layers=layers_here([cuts[index] for index in mine]))
    )
    stack.callback(lambda: stages)  # a plan goes when what it was applied to does
    tokens = torch.randint(256, (NUM_MICROBATCHES, LENGTH + 1))
    last: Any = modules.get(num_stages(run.parallel) - 1)

    def loss(states: Tensor, targets: Tensor) -> Tensor:
        return states_loss(last.model, states, targets, kind="standard") / tokens.numel()

    pipeline = Pipeline(
        dict(modules),
        num_stages(run.parallel),
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        shape=StageShape(1, LENGTH, HIDDEN, torch.float32),
        loss=loss,
        group=distributed.group.WORLD,
        device=CPU,
        swaps=PipelineSwaps(None),
    )

    def step() -> None:
        pipeline.step(tokens[:, :-1], tokens[:, 1:])

    return step


def spread_config(layout: str) -> RunConfig:
    return parse_config(
        {
            "model": {"config": FIELDS},
            "data": {"path": ["none"], "sequence_length": LENGTH},
            "train": {"micro_batch_size": 2},
            "parallel": LAYOUTS[layout],
        }
    )


def spread_step(layout: str, policy: str, stack: ExitStack) -> tuple[Callable[[], None], Applied]:
    run = spread_config(layout)
    model = build_model(run.model, seed=0)
    mesh = build_mesh(run.parallel, "cpu")
    shard_tensors(model, mesh, sequence_parallel=run.parallel.sequence_parallel)
    applied = stack.enter_context(apply(model, policy, memory={"verify": "off"}))
    tokens = torch.randint(256, (2, LENGTH + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])

    def step() -> None:
        loss = next_token_loss(model, batch, num_targets=2 * LENGTH, kind="standard")
        plain(loss.cross_entropy).backward()

    return step, applied


def work(rank: int, directory: Path) -> None:
    peaks = {}
    for schedule, policy in CASES:
        with ExitStack() as stack:
            step = training_step(rank, schedule, policy, stack)
            for _ in range(2):
                step()
            peaks[f"{schedule} {policy}"] = measure_peak(step, CPU).peak_bytes
    for layout, policy in SPREAD:
        with ExitStack() as stack:
            step, applied = spread_step(layout, policy, stack)
            step()
            peaks[f"{layout} {policy}"] = applied.stats.held_bytes
    (directory / f"{rank}.json").write_text(json.dumps(peaks))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    directory = tmp_path_factory.mktemp("peaks")
    run_ranks(work, 2, directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@cache
def traced(schedule: str) -> PipelineGraph:
    return trace_pipeline(config(schedule))


def predicted(schedule: str, policy: str) -> list[int]:
    """Of each rank, above parameters, gradients, and the buffers that stand between steps."""
    pipeline = traced(schedule)
    costs = Costs(lambda region, index: 1e-3, lambda op: 1e-3 if op.name else 0.0)
    layers = [stage.of_layer(name) for stage in pipeline.stages for name in stage.layers]
    plans = [LayerPlan(fates_under(layer, RuleSet(RULES[policy](layer)))) for layer in layers]
    simulation = PipelineSimulator(pipeline, Conditions(costs, {}, gradients_stand=True)).run(plans)
    peaks = []
    for rank, found in zip(pipeline.stages_of, simulation.ranks, strict=True):
        steps = [step for stage in rank if (step := pipeline.stages[stage].step) is not None]
        ends = [(stage == 0) + (stage == len(pipeline.stages) - 1) for stage in rank]
        buffers = pipeline.states_bytes * NUM_MICROBATCHES * sum(2 - end for end in ends)
        peaks.append(found.peak_bytes - sum(step.standing.total for step in steps) - buffers)
    return peaks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", EXACT)
def test_peaks_of_ranks_are_those_that_are_measured(measured: list[dict[str, int]], schedule: str, policy: str) -> None:
    for mine, theirs in zip(predicted(schedule, policy), measured, strict=True):
        assert abs(mine - theirs[f"{schedule} {policy}"]) <= SCALARS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", PARTED)
def test_peaks_are_close_where_backward_passes_are_parted(
    measured: list[dict[str, int]], schedule: str, policy: str
) -> None:
    for mine, theirs in zip(predicted(schedule, policy), measured, strict=True):
        assert 0.97 <= mine / theirs[f"{schedule} {policy}"] <= 1.25


@cache
def traced_part(layout: str) -> Graph:
    return trace_step(spread_config(layout))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_shares_tensors_holds_what_its_trace_says(
    measured: list[dict[str, int]], layout: str, policy: str
) -> None:
    graph = traced_part(layout)
    layers = [graph.of_layer(name) for name in graph.layers]
    held = [fates_under(layer, RuleSet(RULES[policy](layer))).held_bytes for layer in layers]
    assert sum(held) == measured[0][f"{layout} {policy}"]
