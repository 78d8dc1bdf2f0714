"""Stages of a pipeline in two processes and in four: the same bits under each schedule and plan, and nothing stays."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from actmem import Action, Plan, Rule
from actmem.config.schema import ModelConfig, ParallelConfig, ScheduleName
from actmem.config.stages import layers_of_stages, num_stages, stages_of_rank
from actmem.models.building import build_model
from actmem.parallel import Mesh, MeshSizes, build_mesh, shard_data, shard_tensors
from actmem.parallel.orders import orders_of
from actmem.parallel.pipeline import Pipeline, StageModule, StageShape, cut, layers_here
from actmem.planning.actions import Group, PipelineAction, gaps_of
from actmem.runtime import Applied, apply
from actmem.runtime.pipeline import PipelineSwaps
from actmem.runtime.swap.counters import SwapCounters
from actmem.training.loss import plain

pytestmark = pytest.mark.ranks

SCHEDULES: tuple[ScheduleName, ...] = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
NUM_LAYERS, NUM_MICROBATCHES, LENGTH, HIDDEN = 6, 4, 24, 32
SHAPE: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "dense": SHAPE | {"model_type": "qwen3", "intermediate_size": 64},
    "moe": SHAPE
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "router_aux_loss_coef": 0.0,
    },
}
MIXED = Plan(
    "mixed",
    (
        Rule(".*", Action.RECOMPUTE, (0, 3)),
        Rule(".*", Action.SWAP, (1, 4)),
        Rule("mlp", Action.RECOMPUTE, (2, 5), reach="below"),
    ),
)
PLANS: dict[str, str | Plan | None] = {
    "nothing": None,
    "selective": "selective",
    "full": "full",
    "swap": "attention-swap",
    "mixed": MIXED,
}
PLANNED = tuple(name for name in PLANS if name != "nothing")
ALONE = MeshSizes(pp_size=2)
WITH: dict[str, tuple[MeshSizes, tuple[str, ...]]] = {
    "copies": (replace(ALONE, dp_replicate_size=2), ("dense",)),
    "shards": (replace(ALONE, dp_shard_size=2), ("dense", "moe")),
    "tensors": (replace(ALONE, tp_size=2), ("dense", "moe")),
    "experts": (replace(ALONE, dp_shard_size=2, ep_size=2), ("moe",)),
}
"""What else the ranks of a pipeline may share, under one schedule, and the families to try it on."""
PAIRS = [(layout, family) for layout, (_, families) in WITH.items() for family in families]


@dataclass
class Outcome:
    """What one rank had of two steps or, where the second is the first of its kind, three."""

    losses: list[Tensor | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    swaps: list[SwapCounters] = field(default_factory=list)
    order: tuple[PipelineAction, ...] = ()
    dropped: int = 0
    calls_left: int = 0


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step + 100 * part)
    tokens = torch.randint(128, (NUM_MICROBATCHES, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def summed_loss(head: nn.Module, states: Tensor, targets: Tensor) -> Tensor:
    logits = plain(head(states)).flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum") / (NUM_MICROBATCHES * LENGTH)


def whole(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


@dataclass
class Laid:
    """A pipeline of this rank, under a plan or none."""

    mesh: Mesh
    modules: dict[int, StageModule]
    stages: nn.Module
    applied: Applied | None
    pipeline: Pipeline

    def step(self, number: int) -> Tensor | None:
        return self.pipeline.step(*batch(number, self.mesh.data_rank))

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: each for module in self.modules.values() for name, each in module.model.named_parameters()}

    def num_calls_left(self) -> int:
        gc.collect()
        swapper = None if self.applied is None else self.applied.swapper
        return 0 if swapper is None else len(swapper._calls)


def lay_out(schedule: ScheduleName, family: str, plan: str | Plan | None, sizes: MeshSizes = ALONE) -> Laid:
    parallel = ParallelConfig(pp_size=2, pp_schedule=schedule, pp_microbatches=NUM_MICROBATCHES)
    mesh = build_mesh(sizes, "cpu")
    ends = layers_of_stages(parallel, NUM_LAYERS)
    mine = stages_of_rank(parallel, mesh.rank_of("pp"))
    model = build_model(ModelConfig(config=FAMILIES[family]), seed=0)
    modules = {index: cut(model, *ends[index]) for index in mine}
    for module in modules.values():
        shard_tensors(module.model, mesh)
    stages = nn.ModuleList(modules.values())
    memory = {"tier": "disk", "min_swap_bytes": 0}
    layers = layers_here([ends[index] for index in mine])
    applied = None if plan is None else apply(stages, plan, memory=memory, layers=layers)
    last: Any = modules.get(num_stages(parallel) - 1)
    group = mesh.group("pp")
    assert group is not None
    pipeline = Pipeline(
        {index: shard_data(module, mesh, reshard_after_forward=False) for index, module in modules.items()},
        num_stages(parallel),
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        shape=StageShape(1, LENGTH, HIDDEN, torch.float32),
        loss=lambda states, targets: summed_loss(last.model.lm_head, states, targets),
        group=group,
        device=torch.device("cpu"),
        swaps=PipelineSwaps(None if applied is None else applied.swapper),
    )
    return Laid(mesh, modules, stages, applied, pipeline)


def run(schedule: ScheduleName, family: str, plan: str | Plan | None, sizes: MeshSizes = ALONE) -> Outcome:
    laid, outcome = lay_out(schedule, family, plan, sizes), Outcome()
    for step in range(3 if plan == "attention-swap" else 2):
        laid.stages.zero_grad(set_to_none=True)
        outcome.losses.append(laid.step(step))
        parameters = laid.parameters()
        outcome.gradients.append({name: whole(each.grad) for name, each in parameters.items() if each.grad is not None})
        assert len(outcome.gradients[-1]) == len(parameters)
        if laid.applied is not None:
            outcome.swaps.append(laid.applied.stats.swap)
    outcome.order = laid.pipeline.swaps.order
    outcome.calls_left = laid.num_calls_left()
    if laid.applied is not None:
        outcome.dropped = laid.applied.stats.dropped_bytes
        laid.applied.remove()
    return outcome


FAILING_FORWARD = (4, 3)
"""In which forward pass each rank fails under 1F1B, so that neither waits for the other."""


def fail(rank: int) -> tuple[int, int]:
    """A step that fails inside a stage: outputs of its first layer, and calls of layers, that are left of it."""
    laid, count, seen = lay_out("1F1B", "dense", MIXED), itertools.count(1), []

    def watch(layer: nn.Module, args: Any, out: Any) -> None:
        seen.append(weakref.ref(out))
        if next(count) == FAILING_FORWARD[rank]:
            raise ValueError("on purpose")

    layers: Any = next(iter(laid.modules.values())).model.base_model.layers
    next(iter(layers.children())).mlp.register_forward_hook(watch)
    with pytest.raises(RuntimeError) as caught:
        laid.step(0)
    assert isinstance(caught.value.__cause__, ValueError), caught.value
    del caught  # its traceback has the frames of the step, and they have its tensors
    calls_left = laid.num_calls_left()
    return sum(each() is not None for each in seen), calls_left


def alone(family: str, num_parts: int = 1) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    model = build_model(ModelConfig(config=FAMILIES[family]), seed=0)
    losses, gradients = [], []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for part in range(num_parts):
            inputs, targets = batch(step, part)
            loss = summed_loss(model.lm_head, model.base_model(inputs, use_cache=False).last_hidden_state, targets)
            loss.backward()
            total += loss.detach()
        losses.append(total)
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    return losses, gradients


def work(rank: int, directory: Path) -> None:
    outcomes = {
        (schedule, family, plan): run(schedule, family, PLANS[plan])
        for schedule in SCHEDULES
        for family in FAMILIES
        for plan in PLANS
    }
    torch.save(outcomes, directory / str(rank))


def work_and_fail(rank: int, directory: Path) -> None:
    torch.save(fail(rank), directory / str(rank))


def work_with(rank: int, directory: Path) -> None:
    outcomes = {
        (layout, family, plan): run("1F1B", family, PLANS[plan], WITH[layout][0])
        for layout, family in PAIRS
        for plan in PLANS
    }
    torch.save(outcomes, directory / str(rank))


Outcomes = list[dict[tuple[str, str, str], Outcome]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(work, 2, directory)
    return [torch.load(directory / str(rank), weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("four")
    run_ranks(work_with, 4, directory)
    return [torch.load(directory / str(rank), weights_only=False) for rank in range(4)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_have_the_gradients_of_the_whole_model(ranks: Outcomes, schedule: str, family: str) -> None:
    losses, gradients = alone(family)
    for step in range(2):
        found = [each[schedule, family, "nothing"] for each in ranks]
        parts = [outcome.gradients[step] for outcome in found]
        assert not parts[0].keys() & parts[1].keys()
        assert (parts[0] | parts[1]).keys() == gradients[step].keys()
        for name, gradient in (parts[0] | parts[1]).items():
            torch.testing.assert_close(gradient, gradients[step][name], rtol=1e-4, atol=1e-6)
        (loss,) = [outcome.losses[step] for outcome in found if outcome.losses[step] is not None]
        torch.testing.assert_close(loss, losses[step], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", PLANNED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_invariant_01_the_same_bits_under_a_plan(ranks: Outcomes, schedule: str, family: str, plan: str) -> None:
    for rank in ranks:
        assert_same(rank[schedule, family, plan], rank[schedule, family, "nothing"], plan)


@pytest.mark.parametrize(("layout", "family"), PAIRS)
def test_stages_that_share_more_have_the_gradients_of_the_whole_model(
    four_ranks: Outcomes, layout: str, family: str
) -> None:
    sizes = WITH[layout][0]
    num_parts = sizes.dp_replicate_size * sizes.dp_shard_size
    _, gradients = alone(family, num_parts)
    for step, expected in enumerate(gradients):
        found: dict[str, Tensor] = {}
        for each in four_ranks:
            found |= each[layout, family, "nothing"].gradients[step]
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("plan", PLANNED)
@pytest.mark.parametrize(("layout", "family"), PAIRS)
def test_invariant_01_the_same_bits_under_a_plan_where_ranks_share_more(
    four_ranks: Outcomes, layout: str, family: str, plan: str
) -> None:
    for rank in four_ranks:
        assert_same(rank[layout, family, plan], rank[layout, family, "nothing"], plan)


def assert_same(planned: Outcome, expected: Outcome, plan: str) -> None:
    assert planned.order == expected.order
    for mine, theirs in zip(planned.gradients, expected.gradients, strict=False):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert planned.losses[:2] == expected.losses
    assert planned.dropped > 0 or plan == "swap"
    assert planned.calls_left == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_that_is_planned_for_is_the_one_that_runs(ranks: Outcomes, schedule: ScheduleName) -> None:
    parallel = ParallelConfig(pp_size=2, pp_schedule=schedule, pp_microbatches=NUM_MICROBATCHES)
    assert orders_of(parallel) == tuple(rank[schedule, "dense", "nothing"].order for rank in ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_leaves_in_a_step_comes_back_in_it(ranks: Outcomes, schedule: str) -> None:
    for rank in ranks:
        swaps = rank[schedule, "dense", "swap"].swaps
        assert swaps[0].num_begun > 0
        assert swaps[-1].num_refused == swaps[-1].num_failed == 0


def test_what_is_needed_at_once_does_not_leave(ranks: Outcomes) -> None:
    """Under 1F1B the last stage goes back as soon as it has gone forward; that is known after the first step."""
    first, last = (rank["1F1B", "dense", "swap"].swaps for rank in ranks)
    assert last[1].num_begun == last[0].num_begun > 0
    assert first[2].num_begun > first[1].num_begun > first[0].num_begun


def test_nothing_is_left_of_a_step_that_fails(tmp_path: Path) -> None:
    run_ranks(work_and_fail, 2, tmp_path)
    assert [torch.load(tmp_path / str(rank)) for rank in range(2)] == [(0, 0)] * 2


def test_sections_for_the_whole_model_are_taken_by_a_part_of_it() -> None:
    model = build_model(ModelConfig(config=FAMILIES["dense"]), seed=0)
    stage = cut(model, 0, 3)
    sections = {
        "recompute": {"mode": "full", "full_recompute_layer": ["0-1", "4-5"]},
        "swap": {"enable": True, "layer_swap": [{"layers": [2, 3]}]},
    }
    stages, memory = nn.ModuleList([stage]), {"tier": "disk", "min_swap_bytes": 0}
    with apply(stages, sections, layers=[0, 1, 2], memory=memory) as applied:
        stage(batch(0)[0]).sum().backward()
        assert applied.stats.dropped_bytes > 0
        assert applied.stats.swapped_bytes > 0
    assert {name for name, _ in stage.model.named_parameters()} < {name for name, _ in model.named_parameters()}


def test_gaps_are_counted_to_the_first_that_reads() -> None:
    group, other = Group(0, 0), Group(0, 1)
    order = (
        PipelineAction("forward", group),
        PipelineAction("forward", other),
        PipelineAction("input", group),
        PipelineAction("weight", group),
        PipelineAction("backward", other),
    )
    assert gaps_of(order) == {group: 1, other: 2}
