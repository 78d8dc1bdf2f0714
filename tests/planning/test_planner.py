"""Plans for budgets: against every other choice on small graphs, against engine and allocator on real models."""

from __future__ import annotations

import random
from itertools import chain, combinations, pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import actmem
from actmem.config.schema import DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from actmem.errors import ConfigError, HardwareError, PlanError
from actmem.graph import Call, Gap, Graph, Op, RegionGraph, Standing, Step, StepOp, Storage, Value
from actmem.measuring.bench import random_batch
from actmem.memory import measure_peak
from actmem.models.building import build_model
from actmem.planning import Action, Plan, resolve
from actmem.planning.course import Costs
from actmem.planning.planner import Planner, planner_for
from actmem.planning.simulation import Conditions, LayerPlan, Simulation
from actmem.runtime import apply
from actmem.training.budget import planner_of
from actmem.training.loss import next_token_loss
from actmem.training.traced import trace_step

SLIDING: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NUM_LAYERS = 2
SECONDS = {"cheap": 1.0, "dear": 7.0}


@st.composite
def layers(draw: st.DrawFn) -> RegionGraph:
    """A layer of a few ops, each of which reads one or two earlier values; autograd saves some of them."""
    count = draw(st.integers(2, 4))
    storages = [Storage(draw(st.integers(1, 9)) * 2**20, "input")]
    values = [Value(0, (1,), "float32", None)]
    ops = []
    for index in range(count):
        reads = draw(st.sets(st.integers(0, index), min_size=1, max_size=2))
        kept = draw(st.sampled_from([None, None, None, "random"]))
        storages.append(Storage(draw(st.integers(1, 9)) * 2**20, "op", kept))
        values.append(Value(index + 1, (1,), "float32", index))
        name = draw(st.sampled_from(sorted(SECONDS)))
        ops.append(Op(f"{name}{index}", name, tuple(sorted(reads)), (index + 1,), False, False, 0, 0))
    packed = sorted(draw(st.sets(st.integers(0, count), min_size=2)))
    backward = [StepOp("back", "back", 0, 0, False, 2**20, 2**20, 0, 0, (i,), (i,)) for i in range(len(packed))]
    return RegionGraph(tuple(ops), tuple(values), tuple(storages), tuple(packed), "layer", tuple(reversed(backward)))


def step_of(layer: RegionGraph) -> Graph:
    names = [str(index) for index in range(NUM_LAYERS)]
    gaps = tuple(Gap() for _ in range(NUM_LAYERS + 1))
    step = Step(tuple(Call() for _ in names), gaps, Standing(0, 0, 0, 0), 1)
    return Graph(dict.fromkeys(names, "layer"), {"layer": layer}, step)


def conditions() -> Conditions:
    return Conditions(Costs(lambda region, op: SECONDS[region.ops[op].name], lambda op: 2.0 if op.name else 0.0), {})


def every_choice(planner: Planner, layer: RegionGraph) -> list[Simulation]:
    """What each way to save some ops' results and run the others again comes to, in each layer."""
    paths = [op.path for op in layer.ops]
    subsets = chain.from_iterable(combinations(paths, size) for size in range(len(paths) + 1))

    def action(path: str, saved: tuple[str, ...]) -> Action:
        return Action.SAVE if path in saved else Action.RECOMPUTE

    plans = [LayerPlan(resolve(layer, lambda path, saved=saved: action(path, saved))) for saved in subsets]
    different = list({plan.fates.key: plan for plan in plans}.values())
    return [planner.simulator.run(choice) for choice in product(different, repeat=NUM_LAYERS)]


@settings(max_examples=12, deadline=None)
@given(layers())
def test_no_choice_is_faster_within_the_budget(layer: RegionGraph) -> None:
    planner = planner_for(step_of(layer), conditions())
    choices = every_choice(planner, layer)
    peaks = sorted({each.peak_bytes for each in choices})
    for budget in peaks[:: max(1, len(peaks) // 4)]:
        best = min(each.seconds for each in choices if each.peak_bytes <= budget)
        found = planner.plan(budget)
        assert found.simulation.peak_bytes <= budget
        assert found.simulation.seconds <= best + 1e-3 * planner.unplanned.seconds
    with pytest.raises(PlanError, match="the least possible"):
        planner.plan(peaks[0] - 1)


FIELDS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODELS = {
    "dense": ModelConfig(config=FIELDS | {"model_type": "qwen3"}),
    "bf16": ModelConfig(config=FIELDS | {"model_type": "qwen3"}, dtype="bfloat16", loss="chunked"),
    "moe": ModelConfig(
        config=FIELDS
        | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    ),
}
MEMORY = MemoryConfig(min_swap_bytes=2**14, verify="off")


def run_of(model: str, memory: MemoryConfig = MEMORY) -> RunConfig:
    data = DataConfig(path=["none"], sequence_length=128)
    return RunConfig(model=MODELS[model], data=data, train=TrainConfig(micro_batch_size=2, device="cpu"), memory=memory)


@pytest.fixture(scope="module")
def planners() -> dict[str, Planner]:
    return {name: planner_of(run_of(name), trace_step(run_of(name)), gradients_stand=True) for name in MODELS}


@pytest.mark.parametrize(("num_layers", "near"), [(1, 0.03), (3, 0.015), (8, 0.008)])
def test_plans_of_few_layers_are_near_the_bound(num_layers: int, near: float) -> None:
    """From a byte less than no plan needs to just above the least possible; the bound mixes options of a layer, which
    nobody can, and so lies the lower the fewer layers there are."""
    config = MODELS["moe" if num_layers == 8 else "dense"]
    fields = {**(config.config or {}), "num_hidden_layers": num_layers}
    run = RunConfig(
        model=config.model_copy(update={"config": fields}),
        data=DataConfig(path=["none"], sequence_length=256),
        train=TrainConfig(micro_batch_size=4, device="cpu"),
    )
    planner = planner_of(run, trace_step(run), swaps=False)
    least, most = planner.least_peak_bytes, planner.unplanned.peak_bytes
    for budget in (most - 1, *(least + (most - least) * share // 100 for share in (90, 50, 10, 2))):
        planned = planner.plan(budget)
        assert planned.simulation.peak_bytes <= budget
        assert planned.added_share - planned.bound_share < near, budget


@pytest.mark.parametrize("name", MODELS)
def test_measured_peaks_stay_within_random_budgets(planners: dict[str, Planner], name: str) -> None:
    planner, config = planners[name], MODELS[name]
    least, most = planner.least.simulation.peak_bytes, planner.unplanned.peak_bytes
    draw = random.Random(name)
    model = build_model(config, seed=0)
    batch = random_batch(model, 2, 128)

    def step() -> torch.Tensor:
        loss = next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=config.loss).total()
        loss.backward()
        return loss.detach()

    for budget in sorted(draw.randint(least, most) for _ in range(10)):
        planned = planner.plan(budget, seconds=1.0)
        assert planned.simulation.peak_bytes <= budget
        with apply(model, planned, memory=MEMORY):
            for _ in range(2):
                step()
            measured = measure_peak(step, model.device).peak_bytes + planner.standing_bytes
        assert measured <= budget, f"{planned.plan.name}: {measured} measured"


@pytest.mark.parametrize(("name", "share"), [("dense", "50%"), ("bf16", "35%"), ("moe", "20%")])
def test_the_engine_does_what_was_planned(name: str, share: str, tmp_path: Path) -> None:
    run = run_of(name, MEMORY.model_copy(update={"tier": "disk"}))
    planner = planner_of(run, trace_step(run), gradients_stand=True)
    planned = planner.within(share)
    planned.plan.save(tmp_path / "plan.yaml")
    read = Plan.load(tmp_path / "plan.yaml")
    assert planner.simulate(read) == planned.simulation
    assert planned.simulation.swapped_bytes or name == "bf16"
    model = build_model(MODELS[name], seed=0)
    batch = random_batch(model, 2, 128)
    with apply(model, read, memory=MEMORY) as applied:
        next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=MODELS[name].loss).total().backward()
        for region, layer in zip(applied.stats.regions, planned.layers, strict=True):
            assert region.held_bytes == layer.fates.held_bytes
            assert region.dropped_bytes == layer.fates.dropped_bytes
            assert region.swapped_bytes == layer.fates.swapped_bytes


def test_more_memory_is_never_slower(planners: dict[str, Planner]) -> None:
    planner = planners["dense"]
    least, most = planner.least.simulation.peak_bytes, planner.unplanned.peak_bytes
    found = [planner.plan(least + (most - least) * step // 5) for step in range(6)]
    seconds = [each.simulation.seconds for each in found]
    bounds = [each.bound_seconds for each in found]
    slack = 1e-3 * planner.unplanned.seconds
    assert all(later <= earlier + slack for earlier, later in pairwise(seconds))
    assert all(bound <= second + 1e-9 for bound, second in zip(bounds, seconds, strict=True))
    assert seconds[-1] == planner.unplanned.seconds


@pytest.mark.parametrize("policy", ["full", "mlp", "selective"])
def test_no_fixed_policy_beats_the_plan_at_its_own_peak(planners: dict[str, Planner], policy: str) -> None:
    for planner in planners.values():
        fixed = planner.simulate(policy)
        assert planner.plan(fixed.peak_bytes).simulation.seconds <= fixed.seconds


def test_an_impossible_budget_says_what_would_do(planners: dict[str, Planner]) -> None:
    with pytest.raises(PlanError) as caught:
        planners["dense"].plan(2**20)
    told = str(caught.value)
    assert "a budget of 1.00 MiB cannot be met: the least possible is" in told
    assert all(each in told for each in ("parameters", "optimizer", "what would lower it", "micro_batch_size"))


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model = build_model(MODELS["dense"], seed=0)
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    return actmem.trace(model, {"input_ids": tokens, "labels": tokens, "use_cache": False})


@pytest.mark.parametrize(
    "budget", [0, -1, 1.5, -0.2, 0.0, "0", "12 elephants", "140%", "0%", True, None, [1], float("nan")]
)
def test_what_is_no_budget_is_told(graph: Graph, budget: object) -> None:
    with pytest.raises(ConfigError, match="memory_budget"):
        actmem.plan(graph, budget, "cpu")  # type: ignore[arg-type]


def test_a_plan_in_three_lines(graph: Graph) -> None:
    planned = actmem.plan(graph, memory_budget="90%", hardware="a100-sxm-80g")
    assert planned.simulation.peak_bytes <= planned.budget_bytes < planned.unplanned.peak_bytes
    model = build_model(MODELS["dense"], seed=0)
    tokens = torch.randint(512, (2, 64))
    with actmem.apply(model, planned, memory={"tier": "disk"}) as applied:
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert applied.stats.held_bytes < planned.unplanned.held_bytes


def test_a_budget_that_all_fits_in_changes_nothing(graph: Graph) -> None:
    planned = actmem.plan(graph, memory_budget="10GiB", hardware="cpu")
    assert planned.plan.rules == () and planned.simulation == planned.unplanned


def test_unknown_hardware_is_told_with_the_nearest(graph: Graph) -> None:
    with pytest.raises(HardwareError, match="h100-sxm"):
        actmem.plan(graph, "50%", "h10O-sxm")


def test_layers_alone_cannot_be_planned(graph: Graph) -> None:
    with pytest.raises(PlanError, match="whole step"):
        actmem.plan(Graph(graph.layers, graph.kinds), "50%", "cpu")


def test_a_plan_for_layers_that_are_not_all_given_the_same() -> None:
    """Of Qwen3's layers with a sliding window and without, only some are given a mask."""
    fields = SLIDING | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    model = build_model(ModelConfig(config=fields), seed=0)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    planned = actmem.plan(actmem.trace(model, batch), memory_budget="40%", hardware="h100-sxm")
    assert planned.plan.fingerprint is not None
    assert "or" in planned.plan.fingerprint.inputs
    with apply(model, planned.plan) as applied:
        model(**batch).loss.backward()
        assert applied.stats.dropped_bytes > 0
        with pytest.raises(PlanError, match="other inputs"):
            model(input_ids=tokens[:1], labels=tokens[:1], use_cache=False)
