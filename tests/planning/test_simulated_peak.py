"""The predicted peak of a training step is the measured one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from actmem.config.loading import parse_config
from actmem.graph import Graph, StepOp
from actmem.hardware import CostModel
from actmem.measuring.bench import random_batch
from actmem.memory import measure_peak
from actmem.models.building import build_model
from actmem.planning import Action, Plan, Rule
from actmem.planning.conditions import scratch_of
from actmem.planning.course import Costs
from actmem.planning.fates import fates_under
from actmem.planning.plan import RuleSet
from actmem.planning.simulation import Conditions, LayerPlan, Link
from actmem.planning.simulator import simulate
from actmem.runtime import apply
from actmem.runtime.apply import rule_source
from actmem.tracing import trace
from actmem.training.budget import hardware_of
from actmem.training.loss import next_token_loss
from actmem.training.traced import loss_of, trace_step

SHAPE: dict[str, object] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
DENSE = SHAPE | {"intermediate_size": 384}
MOE = SHAPE | {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
MIXED = Plan(
    "mixed",
    (
        Rule(".*", Action.RECOMPUTE, (0,)),
        Rule("mlp", Action.RECOMPUTE, (1,), reach="below"),
        Rule("self_attn", Action.RECOMPUTE, (2,), reach="below"),
    ),
)
SCALARS = 1024
"""Bytes of the scalars that kernels make for themselves, which no op shows."""

Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained. `share`: how far the prediction may be off, beside the scalars."""

    preset: str = "qwen3-tiny"
    model: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    length: int = 128
    autocast: bool = False
    on_weights: bool = False
    share: float = 0.0


HERE = {"model": {"name": "qwen3-tiny"}, "data": {"path": ["none"]}, "train": {"device": "cpu"}}
SETTINGS = {
    "dense": Setting(),
    "bf16": Setting(model={"dtype": "bfloat16"}, length=64),
    "autocast": Setting(autocast=True, length=64),
    "eager": Setting(model={"attn_implementation": "eager"}),
    "dropout": Setting(config={"attention_dropout": 0.1}),
    "tied": Setting(config={"tie_word_embeddings": True}),
    "vocabulary": Setting(config={"vocab_size": 12000}, length=128),
    "chunked": Setting(model={"loss": "chunked"}, config={"vocab_size": 12000}, length=128),
    "grouped": Setting("qwen3-moe-tiny", share=0.0005),
    # The CPU's grouped product packs one expert's bfloat16 operands into memory of its own.
    "grouped bf16": Setting("qwen3-moe-tiny", {"dtype": "bfloat16"}, length=64, share=0.02),
    # The gradients of one product's operands stand together before either is added to what stands.
    "many experts": Setting("qwen3-moe-tiny", config={"num_experts": 64, "vocab_size": 257}, share=0.0005),
    "batched": Setting("qwen3-moe-tiny", {"experts_implementation": "batched_mm"}, length=32),
    # Layers of one kind are traced once, and here each routes other numbers of tokens to its experts.
    "one by one": Setting(
        "qwen3-moe-tiny", {"experts_implementation": "eager"}, length=64, on_weights=True, share=0.04
    ),
    "router": Setting("qwen3-moe-tiny", config={"output_router_logits": True}, share=0.0005),
}


@pytest.fixture(autouse=True)
def _what_stands_is_no_garbage() -> Iterator[None]:
    """Each measurement collects, and what stands already need not be looked through."""
    gc.freeze()
    yield
    gc.unfreeze()


def predicted_peak(
    graph: Graph, policy: str | Plan, *, gradients_stand: bool, link: Link | None = None, min_swap_bytes: int = 0
) -> int:
    """Above what stands through the whole step."""
    source = rule_source(policy)
    plans = []
    for layer, name in enumerate(graph.layers):
        region = graph.of_layer(name)
        rules = RuleSet(source.rules(layer, region))
        fates = fates_under(region, rules, min_swap_bytes=min_swap_bytes)
        plans.append(LayerPlan(fates, dict.fromkeys(fates.swapped, "disk")))
    op_scratch, step_op_scratch = scratch_of(CostModel(hardware_of(parse_config(HERE))))
    costs = Costs(
        lambda region, index: 1e-3,
        lambda op: 1e-3 if op.name else 0.0,
        op_scratch=op_scratch,
        step_op_scratch=step_op_scratch,
    )
    links = {"disk": link or Link(1e9, 1e9)}
    simulation = simulate(graph, plans, Conditions(costs, links, gradients_stand=gradients_stand))
    assert graph.step is not None
    standing = graph.step.standing
    return simulation.peak_bytes - standing.total + (0 if gradients_stand else standing.gradients)


def measured_peak(model: nn.Module, step: Step, *, gradients_stand: bool) -> int:
    def fresh_step() -> None:
        step()
        model.zero_grad(set_to_none=True)

    if not gradients_stand:
        model.zero_grad(set_to_none=True)
    return measure_peak(step if gradients_stand else fresh_step, torch.device("cpu")).peak_bytes


def both_peaks(
    model: nn.Module, step: Step, graph: Graph, policy: str | Plan, regions: list[str] | None = None
) -> Iterator[tuple[int, int]]:
    """Predicted and measured, with gradients that stand and without."""
    with ExitStack() as stack:
        if policy != "none":
            stack.enter_context(apply(model, policy, regions=regions, memory={"verify": "off"}))
        step()
        step()  # a layer whose first call was an exception is learned again
        for stand in (True, False):
            yield (
                predicted_peak(graph, policy, gradients_stand=stand),
                measured_peak(model, step, gradients_stand=stand),
            )


def language_model(setting: Setting) -> tuple[nn.Module, Step, Graph]:
    shape = MOE if "moe" in setting.preset else DENSE
    config = parse_config(
        {
            "model": {"name": setting.preset, "config": shape | setting.config} | setting.model,
            "data": {"path": ["none"], "sequence_length": setting.length},
            "train": {"micro_batch_size": 2} | ({"autocast": "bfloat16"} if setting.autocast else {}),
        }
    )
    model = build_model(config.model, seed=0)
    batch = random_batch(model, 2, setting.length)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting.autocast):
            loss = next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=config.model.loss).total()
        loss.backward()

    if setting.on_weights:
        arguments = {"inputs": batch.inputs, "targets": batch.targets}
        return model, step, trace(model, arguments, loss=loss_of(config.model.loss))
    return model, step, trace_step(config)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_peak_of_a_language_model(setting: Setting) -> None:
    model, step, graph = language_model(setting)
    for policy in ("full", MIXED):
        for predicted, measured in both_peaks(model, step, graph, policy):
            assert abs(predicted - measured) <= SCALARS + measured * setting.share, (policy, predicted / measured)


@pytest.mark.parametrize(("policy", "floor"), [("attention-swap", 0), ("layer-swap", 65536)])
def test_peak_under_swaps_lies_between_fast_and_slow_links(policy: str, floor: int) -> None:
    """How far copies come beside the computing is up to the machine; what they move is not."""
    model, step, graph = language_model(Setting())
    with apply(model, policy, memory={"verify": "off", "tier": "disk", "min_swap_bytes": floor}):
        step()
        step()
        measured = measured_peak(model, step, gradients_stand=True)
    fast, slow = (
        predicted_peak(graph, policy, gradients_stand=True, link=Link(rate, rate), min_swap_bytes=floor)
        for rate in (1e15, 1.0)
    )
    assert fast * 0.98 <= measured <= slow * 1.02
    assert fast < 0.85 * slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.silu(self.up(hidden)))


class Saturating(Block):
    """Its output is saved by itself, and by the next one of its kind as an input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.up(hidden))


class Idle(Block):
    """Saves nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1


class Editing(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        made = self.up(hidden)
        made.mul_(2)
        made.relu_()
        return self.down(made)


class Dropping(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(hidden), 0.1))


class Attending(Block):
    def forward(self, hidden: Tensor, encoded: Tensor | None = None) -> Tensor:
        assert encoded is not None
        return hidden + torch.tanh(self.up(hidden) * torch.sigmoid(self.down(encoded)))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Collecting(Stack):
    """Holds on to all outputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = [hidden := block(hidden) for block in self.blocks]
        return torch.stack(outputs).mean(0)


class Encoding(Stack):
    """All blocks read the output of one encoder."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.encoder = nn.Linear(128, 128)

    def forward(self, hidden: Tensor) -> Tensor:
        encoded = self.encoder(hidden)
        for block in self.blocks:
            hidden = block(hidden, encoded)
        return hidden


STACKS: dict[str, Callable[[], Stack]] = {
    "plain": lambda: Stack(Block(), Block(), Block()),
    "output saved twice": lambda: Stack(Saturating(), Saturating(), Saturating()),
    "nothing to save": lambda: Stack(Block(), Idle(), Block(), Idle()),
    "first without gradient": lambda: Stack(Idle(), Block(), Block()),
    "edits": lambda: Stack(Editing(), Editing(), Editing()),
    "dropout": lambda: Stack(Dropping(), Dropping(), Dropping()),
    "all differ": lambda: Stack(Saturating(), Block(), Editing(), Dropping()),
    "shared encoder": lambda: Encoding(Attending(), Attending(), Attending()),
    "outputs collected": lambda: Collecting(Block(), Block(), Block()),
}


def squares(model: nn.Module, batch: Mapping[str, object]) -> Tensor:
    loss = model(batch["features"]).square().mean()
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.filterwarnings("ignore::actmem.runtime.engine.NoEffectWarning")
@pytest.mark.parametrize("make", STACKS.values(), ids=STACKS.keys())
def test_peak_of_a_stack_of_modules(make: Callable[[], Stack]) -> None:
    torch.manual_seed(0)
    model = make()
    batch = {"features": torch.randn(256, 128)}
    regions = [f"blocks.{index}" for index in range(len(model.blocks))]
    graph = trace(model, batch, loss=squares, regions=regions)
    recomputing_first = Plan("first", (Rule(".*", Action.RECOMPUTE, (0,)),))
    for policy in ("none", "full", recomputing_first):
        for predicted, measured in both_peaks(model, lambda: squares(model, batch).backward(), graph, policy, regions):
            assert abs(predicted - measured) <= SCALARS, (policy, predicted, measured)


def test_a_predicted_peak_says_what_stands() -> None:
    _, _, graph = language_model(Setting(length=32))
    source = rule_source("none")
    plans = []
    for layer, name in enumerate(graph.layers):
        region = graph.of_layer(name)
        plans.append(LayerPlan(fates_under(region, RuleSet(source.rules(layer, region)))))
    costs = Costs(lambda region, index: 0.0, _no_seconds)
    peak = simulate(graph, plans, Conditions(costs, {})).peak
    assert graph.step is not None
    assert peak.bytes_by_use["parameters"] == graph.step.standing.parameters
    assert sum(peak.bytes_by_use.values()) == peak.num_bytes


def _no_seconds(op: StepOp) -> float:
    return 0.0
