"""What kernels take for themselves, and what Python's names hold: what is predicted is what is measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import actmem
from actmem.config.schema import ModelConfig
from actmem.errors import ApplyError, PlanError
from actmem.graph import Graph
from actmem.hardware import load_hardware
from actmem.memory import measure_peak
from actmem.models.building import build_model
from actmem.planning import Action, Plan, Rule
from actmem.planning.conditions import conditions_on
from actmem.planning.planner import planner_for
from actmem.tracing.trace import default_loss

CPU = torch.device("cpu")
POLICIES = ("none", "full", "selective", 0.5)


class Attending(nn.Module):
    """One projection for query, key and value, whose parts lie in memory as the kernel would not have them."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        return hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Convolving(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv1d(width, width, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + functional.gelu(self.conv(self.norm(hidden).transpose(1, 2)).transpose(1, 2))


class Sharing(nn.Module):
    """One weight, used twice: the gradients of both uses stand until they are added up."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(functional.gelu(self.linear(self.norm(hidden))))


class Selecting(nn.Module):
    """What a mask takes is known by its numbers alone."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden)
        chosen = wide > 0
        made = torch.zeros_like(wide)
        made[chosen] = wide[chosen].tanh()
        return hidden + self.down(made)


class Conjugating(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        turned = torch.complex(hidden.sin(), hidden)
        product = torch.bmm(turned.conj().transpose(1, 2), turned)
        return hidden + self.out(torch.bmm(turned, product).abs())


class Softened(torch.autograd.Function):
    """A Function whose kernels nobody sees; what it saves is its operand."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        return torch.tanh(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (given,) = ctx.saved_tensors
        made: Tensor = gradient * (1 - torch.tanh(given) ** 2)
        return made


class Softening(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        softened: Tensor = Softened.apply(self.up(self.norm(hidden)))  # type: ignore[no-untyped-call]
        return hidden + self.down(softened)


class Judging(nn.Module):
    """What autograd saves of a figure that is only looked at goes with it, and is never asked for."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        largest = self.norm(hidden).abs().max().detach()
        return hidden + self.down(functional.gelu(self.up(hidden) * float(largest > 0)))


class Naming(nn.Module):
    """Its code has a name, to the end of the call, for something large that is read early."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = functional.gelu(self.wide(hidden))
        middle = self.narrow(wide)
        return hidden + self.down(functional.gelu(self.up(middle)))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def narrow_gpt2(attention: str) -> GPT2LMHeadModel:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 32, "vocab_size": 128, "n_positions": 256}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, use_cache=False, attn_implementation=attention))


def language_model(family: str, dtype: str) -> PreTrainedModel:
    mixture = {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    return build_model(ModelConfig(config=SIZES | (mixture if family == "mixture" else {}), dtype=dtype), seed=0)


SIZES = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
TOKENS = {name: torch.zeros(2, 128, dtype=torch.int64) for name in ("input_ids", "labels")}
CASES = {
    "Qwen3 in bfloat16": (partial(language_model, "dense", "bfloat16"), TOKENS, 0.0, 0.014),
    "experts in bfloat16": (partial(language_model, "mixture", "bfloat16"), TOKENS, 0.0, 0.014),
    "attention": (lambda: Stack(Attending), {"hidden": torch.ones(4, 256, 64)}, 0.0, 0.0),
    "convolution": (lambda: Stack(Convolving), {"hidden": torch.ones(4, 256, 64)}, 0.0, 0.09),
    "a weight used twice": (lambda: Stack(Sharing), {"hidden": torch.ones(1, 32, 256)}, 0.0, 0.0),
    "GPT-2": (partial(narrow_gpt2, "sdpa"), {"input_ids": torch.zeros(4, 256, dtype=torch.int64)}, 0.0, 0.0),
    "GPT-2, eager": (partial(narrow_gpt2, "eager"), {"input_ids": torch.zeros(4, 256, dtype=torch.int64)}, 0.0, 0.0),
    "a mask": (lambda: Stack(Selecting), {"hidden": torch.ones(4, 128, 64)}, 0.0, 0.5),
    "conjugates": (lambda: Stack(Conjugating), {"hidden": torch.ones(4, 128, 64)}, 0.0, 0.0),
    "a Function": (lambda: Stack(Softening), {"hidden": torch.ones(4, 128, 64)}, 0.0, 0.0),
    "a figure": (lambda: Stack(Judging), {"hidden": torch.ones(4, 128, 64)}, 0.0, 0.2),
    "names": (lambda: Stack(Naming), {"hidden": torch.ones(4, 256, 64)}, 0.0, 0.0),
}
"""Model, batch, and by how much the prediction may be too low, and too high: where a kernel takes less on some operands
than on others of the same shapes, the most is taken for all of them."""
OWN_PLANS = {"a Function": [Plan("up", (Rule(".*", Action.RECOMPUTE), Rule("up.*", Action.SAVE, (3,))))]}


@pytest.mark.parametrize("case", CASES)
def test_peaks_are_predicted(case: str) -> None:
    build, batch, too_low, too_high = CASES[case]
    model = build()
    regions = list(model.blocks) if isinstance(model, Stack) else None

    def step() -> None:
        model.zero_grad(set_to_none=False)
        default_loss(model, batch).backward()

    hardware = load_hardware("cpu").model_copy(update={"num_threads": 1})
    planner = planner_for(actmem.trace(model, batch, regions=regions), conditions_on(hardware, tiers=()))
    for policy in (*POLICIES, *OWN_PLANS.get(case, ())):
        share = planner.budget_of(policy) if isinstance(policy, float) else 0
        plan = planner.plan(max(share, planner.least_peak_bytes)).plan if share else policy
        predicted = planner.simulate(plan).peak_bytes - planner.standing_bytes
        with actmem.apply(model, plan, regions=regions):
            for _ in range(2):
                step()
            measured = measure_peak(step, CPU).peak_bytes
        assert measured * (1 - too_low) - 1024 <= predicted <= measured * (1 + too_high) + 1024, policy


def scratch(graph: Graph) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for region in graph.kinds.values():
        found |= {region.signature(index): op.scratch_bytes for index, op in enumerate(region.ops)}
        found |= {op.signature: op.scratch_bytes for op in region.backward}
    return found


def test_nobody_looks_for_a_model_without_numbers_unless_asked() -> None:
    with torch.device("meta"):
        model, batch = Stack(Attending), {"hidden": torch.empty(4, 256, 64)}
    regions = list(model.blocks)
    assert not any(scratch(actmem.trace(model, batch, regions=regions)).values())
    asked = scratch(actmem.trace(model, batch, regions=regions, kernels_on=CPU))
    real = Stack(Attending)
    assert asked == scratch(actmem.trace(real, {"hidden": torch.ones(4, 256, 64)}, regions=list(real.blocks)))
    assert any(asked.values())


def test_a_trace_leaves_random_numbers_and_gradients_alone() -> None:
    model, batch, state = Stack(Attending), {"hidden": torch.ones(4, 256, 64)}, torch.get_rng_state()
    actmem.trace(model, batch, regions=list(model.blocks))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


def test_what_was_seen_is_in_the_file_of_a_graph() -> None:
    model = Stack(Attending)
    graph = actmem.trace(model, {"hidden": torch.ones(4, 256, 64)}, regions=list(model.blocks))
    assert Graph.from_dict(graph.to_dict()) == graph


class Wide(nn.Module):
    """Mostly weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(hidden)))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_autocast_keeps_of_weights_stands_whatever_the_plan(keeps: bool) -> None:
    model, batch = Stack(Wide), {"hidden": torch.ones(2, 32, 64)}
    regions = list(model.blocks)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
            loss = default_loss(model, batch)
        loss.backward()

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
        graph = actmem.trace(model, batch, regions=regions)
    hardware = load_hardware("cpu").model_copy(update={"num_threads": 1})
    planner = planner_for(graph, conditions_on(hardware, tiers=()))
    for plan in (planner.within(0.7).plan, "full"):
        with actmem.apply(model, plan, regions=regions):
            for _ in range(2):
                step()
            measured = measure_peak(step, CPU).peak_bytes
        assert abs(planner.simulate(plan).peak_bytes - planner.standing_bytes - measured) <= 1024


@torch.library.custom_op("actmem_tests::by_largest", mutates_args=())
def by_largest(values: Tensor) -> Tensor:
    return values * (1 / values.abs().max().item())


by_largest.register_autograd(lambda ctx, grad: grad)


class Scaling(Wide):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + by_largest(super().forward(hidden))


def test_ops_of_others_are_not_run_on_zeros() -> None:
    model = Stack(Scaling)
    graph = actmem.trace(model, {"hidden": torch.ones(2, 8, 64)}, regions=list(model.blocks))
    assert scratch(graph)["by_largest(2x8x64 float32)"] is None


def test_a_profile_that_is_being_taken_goes_on() -> None:
    model, batch = Stack(Wide), {"hidden": torch.ones(2, 8, 64)}
    with torch.profiler.profile() as profiled:
        model(**batch)
        graph = actmem.trace(model, batch, regions=list(model.blocks))
    assert profiled.key_averages()
    assert not any(scratch(graph).values())


@pytest.mark.parametrize("device", ["cuda:99", "meta", "no device", 3.5])
def test_a_device_that_is_not_there_is_refused(device: object) -> None:
    model = Stack(Wide)
    with pytest.raises(ApplyError, match=r"is no device that is here; allowed: .*cpu"):
        actmem.trace(model, {"hidden": torch.ones(2, 8, 64)}, regions=list(model.blocks), kernels_on=device)


def test_only_a_graph_is_planned() -> None:
    with pytest.raises(PlanError, match=r"graph is a Stack; allowed: what actmem.trace"):
        actmem.plan(Stack(Wide), 0.5, "cpu")
