"""State belongs to the call: any number of forwards, and backward passes of every shape and order."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_runs import (
    RECOMPUTING,
    Outcome,
    Stack,
    assert_same_bits,
    assert_same_outcome,
    assert_same_tensors,
    features,
    gradients_of,
    language_loss,
    planned_copy,
    stack_steps,
    tiny_qwen3,
    token_batch,
)
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from transformers import DynamicCache, Qwen3ForCausalLM

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")

# Renamed in transformers 5.
CACHE = "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"
Scenario = Callable[[nn.Module, int], Outcome]


def loss_of(model: nn.Module, step: int) -> Tensor:
    return language_loss(token_batch(step))(model)


def two_forwards_in_order(model: nn.Module, number: int) -> Outcome:
    first, second = loss_of(model, 2 * number), loss_of(model, 2 * number + 1)
    first.backward()
    second.backward()
    return gradients_of(model)


def two_forwards_out_of_order(model: nn.Module, number: int) -> Outcome:
    first, second = loss_of(model, 2 * number), loss_of(model, 2 * number + 1)
    second.backward()
    first.backward()
    return gradients_of(model)


def two_forwards_in_one_graph(model: nn.Module, number: int) -> Outcome:
    (loss_of(model, 2 * number) * loss_of(model, 2 * number + 1)).backward()
    return gradients_of(model)


def accumulation(model: nn.Module, number: int) -> Outcome:
    for micro_batch in range(3):
        (loss_of(model, 3 * number + micro_batch) / 3).backward()
    return gradients_of(model)


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize(
    "scenario", [two_forwards_in_order, two_forwards_out_of_order, two_forwards_in_one_graph, accumulation]
)
@pytest.mark.parametrize("family", ["dense", "grouped_mm", "eager"])
def test_invariant_05_two_forwards_before_a_backward(family: str, scenario: Scenario, policy: str) -> None:
    assert_same_outcome(tiny_qwen3(family), policy, scenario)


def second_backward_of_a_retained_graph(model: nn.Module, number: int) -> Outcome:
    loss = loss_of(model, number)
    loss.backward(retain_graph=True)
    once = gradients_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return once | {f"three times {name}": each for name, each in gradients_of(model).items()}


def gradient_of_a_part_before_the_whole(model: nn.Module, number: int) -> Outcome:
    loss = loss_of(model, number)
    last = dict(model.model.layers[1].named_parameters())
    part = grad(loss, [last["mlp.down_proj.weight"], last["self_attn.q_proj.weight"]], retain_graph=True)
    norm = grad(loss, model.model.layers[0].input_layernorm.weight, retain_graph=True)
    loss.backward()
    return gradients_of(model) | {f"part {index}": each for index, each in enumerate((*part, *norm))}


def gradient_of_a_part_only(model: nn.Module, number: int) -> Outcome:
    names, parameters = zip(*model.model.layers[0].mlp.named_parameters(), strict=True)
    return dict(zip(names, grad(loss_of(model, number), parameters), strict=True))


def vector_jacobian_products_one_by_one(model: nn.Module, number: int) -> Outcome:
    logits = model(token_batch(number)["input_ids"]).logits
    rows = [
        grad(logits[0, index].square().sum(), model.model.embed_tokens.weight, retain_graph=True)[0]
        for index in (3, 0, 9)
    ]
    return {f"row {index}": row for index, row in enumerate(rows)}


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize(
    "scenario",
    [
        second_backward_of_a_retained_graph,
        gradient_of_a_part_before_the_whole,
        gradient_of_a_part_only,
        vector_jacobian_products_one_by_one,
    ],
)
def test_invariant_05_retained_graphs_and_parts_of_them(qwen3: nn.Module, scenario: Scenario, policy: str) -> None:
    assert_same_outcome(qwen3, policy, scenario)


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("family", ["dense", "eager"])
def test_invariant_05_double_backward(family: str, policy: str) -> None:
    def gradient_penalty(model: nn.Module, number: int) -> Outcome:
        embeddings = model.model.embed_tokens(token_batch(number)["input_ids"])
        loss = model(inputs_embeds=embeddings, labels=token_batch(number)["labels"]).loss
        (slope,) = grad(loss, embeddings, create_graph=True)
        (loss + slope.square().sum()).backward()
        return gradients_of(model)

    assert_same_outcome(tiny_qwen3(family, attention="eager"), policy, gradient_penalty)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_invariant_05_double_backward_through_an_op_that_cannot_is_refused_alike(qwen3: nn.Module, policy: str) -> None:
    def message(model: nn.Module) -> str:
        embeddings = model.model.embed_tokens(token_batch()["input_ids"])
        loss = model(inputs_embeds=embeddings).logits.square().mean()
        with pytest.raises(RuntimeError) as caught:
            grad(grad(loss, embeddings, create_graph=True)[0].sum(), list(model.parameters()))
        return str(caught.value)

    planned, applied = planned_copy(qwen3, policy)
    with applied:
        assert message(planned) == message(qwen3)


class Fork(nn.Module):
    """A region with two outputs that share their beginning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        trunk = torch.tanh(self.trunk(hidden) * 2) + 1
        return torch.sigmoid(self.left(trunk) * trunk), torch.sin(self.right(trunk * 3)).exp()


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("used", [0, 1, "first then second", "second then first"])
def test_invariant_05_backward_through_some_outputs(used: object, policy: str) -> None:
    def some_outputs(model: nn.Module, number: int) -> Outcome:
        outputs = model(features(4, 8, seed=number))
        order = {0: (0,), 1: (1,), "first then second": (0, 1), "second then first": (1, 0)}[used]
        for index in order:
            outputs[index].sum().backward(retain_graph=index != order[-1])
        return gradients_of(model)

    assert_same_outcome(Stack(Fork()), policy, some_outputs, regions=["blocks.0"])


class GatedBlock(nn.Module):
    """A feed-forward block with dropout, whose forward raises on demand: a chain long enough to leave in the middle."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.gate, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.fails = False

    def forward(self, hidden: Tensor) -> Tensor:
        gated = nn.functional.silu(self.gate(self.norm(hidden)))
        if self.fails:
            raise ValueError("no more tokens")
        return hidden + self.dropout(self.down(gated * gated.sigmoid()))


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_invariant_05_a_module_that_is_used_twice(policy: str) -> None:
    shared = GatedBlock(dropout=0.2)
    model = Stack(shared, GatedBlock(1), shared)

    def run(each: nn.Module, number: int) -> Outcome:
        each(features(4, 8, seed=number)).square().mean().backward()
        return gradients_of(each)

    applied = assert_same_outcome(model, policy, run, regions=["blocks.0", "blocks.1"])
    assert [region.num_calls for region in applied.stats.regions] == [6, 3]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_invariant_05_a_region_that_calls_itself(policy: str) -> None:
    class Recursive(GatedBlock):
        def forward(self, hidden: Tensor, depth: int = 2) -> Tensor:
            hidden = super().forward(hidden)
            return self(hidden, depth - 1) * hidden if depth else hidden

    def run(each: nn.Module, number: int) -> Outcome:
        each(features(4, 8, seed=number)).square().mean().backward()
        return gradients_of(each)

    assert_same_outcome(Stack(Recursive()), policy, run, regions=["blocks.0"])


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("failing_round", [0, 2], ids=["while learning", "after learning"])
def test_invariant_05_a_forward_that_raises_leaves_nothing_behind(failing_round: int, policy: str) -> None:
    def run(model: nn.Module, number: int) -> Outcome:
        if number == failing_round:
            model.blocks[1].fails = True
            with pytest.raises(ValueError, match="no more tokens"):
                model(features(4, 8))
            model.blocks[1].fails = False
        model(features(4, 8, seed=number)).square().mean().backward()
        return gradients_of(model)

    assert_same_outcome(Stack(GatedBlock(), GatedBlock(1)), policy, run, num_rounds=4, regions=["blocks.0", "blocks.1"])


def test_invariant_15_a_first_call_that_raised_does_not_spend_the_verification() -> None:
    planned, applied = planned_copy(Stack(GatedBlock()), "full", regions=["blocks.0"], verify="first")
    with applied:
        planned.blocks[0].fails = True
        with pytest.raises(ValueError, match="no more tokens"):
            planned(features(4, 8))
        planned.blocks[0].fails = False
        planned(features(4, 8)).sum().backward()
        assert applied.stats.regions[0].num_verified > 0


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("family", ["dense", "grouped_mm"])
def test_invariant_05_backward_split_in_two_as_by_zero_bubble(family: str, policy: str) -> None:
    """Gradients of inputs first, those of weights later, two microbatches deep."""

    def split(model: nn.Module, number: int) -> Outcome:
        stage = model.model.layers
        positions = torch.arange(16)[None]
        rotary = model.model.rotary_emb(features(2, 16, 32), positions)
        pending, outcome = [], {}
        for microbatch in range(2):
            hidden = features(2, 16, 32, seed=2 * number + microbatch).requires_grad_()
            out = hidden
            for layer in stage:
                out = layer(out, position_embeddings=rotary, position_ids=positions)
            gradient = [features(2, 16, 32, seed=50 + microbatch)]
            inputs, groups = stage_backward_input([out], gradient, [hidden], stage.parameters())
            outcome[f"input {microbatch}"] = inputs[0].clone()
            pending.append(groups)
        for groups in pending:
            stage_backward_weight(stage.parameters(), groups)
        return outcome | gradients_of(model)

    assert_same_outcome(tiny_qwen3(family), policy, split)


def eval_every_other_round(model: nn.Module, number: int) -> Outcome:
    model.train(number % 2 == 0)
    loss_of(model, number).backward()
    return gradients_of(model)


def measured_without_gradients_in_between(model: nn.Module, number: int) -> Outcome:
    with torch.no_grad():
        before = loss_of(model, number)
    loss = loss_of(model, number)
    with torch.inference_mode():
        between = loss_of(model, number).clone()
    loss.backward()
    return gradients_of(model) | {"before": before, "between": torch.tensor(float(between))}


def attention_dropout_switched_on(model: nn.Module, number: int) -> Outcome:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3 if number in (2, 3) else 0.0
    loss_of(model, number).backward()
    return gradients_of(model)


def attention_dropout_switched_off(model: nn.Module, number: int) -> Outcome:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0 if number in (2, 3) else 0.3
    loss_of(model, number).backward()
    return gradients_of(model)


def some_parameters_frozen_for_a_while(model: nn.Module, number: int) -> Outcome:
    for name, each in model.named_parameters():
        each.requires_grad_(not (number in (2, 3) and ("q_proj" in name or "norm" in name)))
    loss_of(model, number).backward()
    return gradients_of(model)


def frozen_parameters_that_change_places(model: nn.Module, number: int) -> Outcome:
    """Always equally many saved tensors, but not the same ones."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.requires_grad_(number % 2 == 0)
        layer.self_attn.o_proj.weight.requires_grad_(number % 2 == 1)
    loss_of(model, number).backward()
    return gradients_of(model)


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "scenario",
    [
        eval_every_other_round,
        measured_without_gradients_in_between,
        attention_dropout_switched_on,
        attention_dropout_switched_off,
        some_parameters_frozen_for_a_while,
        frozen_parameters_that_change_places,
    ],
)
def test_invariant_01_what_was_learned_no_longer_holds(scenario: Scenario, attention: str, policy: str) -> None:
    model = tiny_qwen3(attention=attention, attention_dropout=0.2 if scenario is eval_every_other_round else 0.0)
    assert_same_outcome(model, policy, scenario, num_rounds=6)


def test_invariant_13_a_plan_takes_effect_once_frozen_layers_are_trained() -> None:
    """Frozen layers save nothing, which must not be taken for all time."""

    def frozen_at_first(model: nn.Module, number: int) -> Outcome:
        for name, each in model.named_parameters():
            each.requires_grad_("embed" not in name and (number > 0 or "layers" not in name))
        loss_of(model, number).backward()
        return gradients_of(model)

    applied = assert_same_outcome(tiny_qwen3(), "full", frozen_at_first, num_rounds=4)
    assert all(region.num_replayed_ops > 0 for region in applied.stats.regions)
    assert all(region.dropped_bytes > 0 for region in applied.stats.regions)


def test_invariant_13_a_frozen_layer_does_not_speak_for_the_others() -> None:
    """The embedding and the first layer are frozen; the second, of the same kind and inputs, still has its plan."""
    model = tiny_qwen3()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)

    def run(each: nn.Module, number: int) -> Outcome:
        loss_of(each, number).backward()
        return gradients_of(each)

    applied = assert_same_outcome(model, "full", run)
    assert applied.stats.regions[1].dropped_bytes > 0
    assert applied.stats.regions[1].num_replayed_ops > 0


class LowRankLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank term."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(features(4, base.in_features, seed=seed))
        self.up = nn.Parameter(features(base.out_features, 4, seed=seed + 1) / 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.dropout(hidden) @ self.down.T @ self.up.T


def adapt(model: nn.Module, layers: tuple[int, ...]) -> None:
    model.requires_grad_(False)
    for index in layers:
        attention = model.model.layers[index].self_attn
        for name in ("q_proj", "v_proj"):
            setattr(attention, name, LowRankLinear(getattr(attention, name), seed=index))


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("inputs_require_grad", [False, True])
@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_invariant_01_adapters_on_a_frozen_base(
    qwen3: nn.Module, layers: tuple[int, ...], inputs_require_grad: bool, policy: str
) -> None:
    adapt(qwen3, layers)

    def run(model: nn.Module, number: int) -> Outcome:
        embeddings = model.model.embed_tokens(token_batch(number)["input_ids"])
        embeddings.requires_grad_(inputs_require_grad)
        model(inputs_embeds=embeddings, labels=token_batch(number)["labels"]).loss.backward()
        return gradients_of(model) | ({"input": embeddings.grad} if inputs_require_grad else {})

    applied = assert_same_outcome(qwen3, policy, run)
    assert applied.stats.dropped_bytes > 0


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("family", ["dense", "eager"])
def test_invariant_02_a_cache_is_appended_once(family: str, policy: str) -> None:
    def in_two_chunks(model: nn.Module, number: int) -> Outcome:
        cache = DynamicCache(config=model.config)
        tokens = token_batch(number)["input_ids"]
        chunks = (tokens[:, :6], tokens[:, 6:12], tokens[:, 12:])
        losses = [model(chunk, labels=chunk, use_cache=True, **{CACHE: cache}).loss for chunk in chunks]
        assert cache.get_seq_length() == 16
        sum(losses).backward()
        assert cache.get_seq_length() == 16
        return gradients_of(model) | {f"keys {i}": layer.keys.detach() for i, layer in enumerate(cache.layers)}

    assert_same_outcome(tiny_qwen3(family), policy, in_two_chunks)


class NoisyCounter(nn.Module):
    """Everything that a second run of Python would do twice, or differently."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("num_tokens", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.generator = torch.Generator().manual_seed(seed)
        self.num_calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        self.num_tokens += hidden.shape[0]
        out = torch.tanh(self.linear(hidden) * random.uniform(0.5, 2.0))
        with torch.no_grad():
            self.mean.lerp_(out.mean(0), 0.1)
            self.num_tokens.copy_(self.num_tokens + 0)
        mask = torch.rand(hidden.shape, generator=self.generator) > 0.3
        noise = torch.empty_like(out).normal_(generator=self.generator)
        return torch.exp(out * mask - noise * 0.1) * torch.randn_like(out).sigmoid() + nn.functional.dropout(out, 0.2)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoisyCounter:
        twin = NoisyCounter()
        twin.load_state_dict(self.state_dict())
        twin.generator.set_state(self.generator.get_state())
        return twin


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_invariant_02_counters_and_random_numbers_advance_once(policy: str) -> None:
    def run(model: nn.Module, number: int) -> Outcome:
        random.seed(number)
        for _ in range(2):
            model(features(4, 8, seed=number)).square().mean().backward()
        follow_up = {
            "python": torch.tensor(random.random()),
            "torch": torch.rand(()),
            "own": torch.rand((), generator=model.blocks[0].generator),
        }
        assert [block.num_calls for block in model.blocks] == [2 * number + 2] * 2
        return gradients_of(model) | follow_up

    assert_same_outcome(Stack(NoisyCounter(), NoisyCounter(1)), policy, run, regions=["blocks.0", "blocks.1"])


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_invariant_02_no_module_or_hook_runs_in_the_backward_pass(qwen3: nn.Module, policy: str) -> None:
    planned, applied = planned_copy(qwen3, policy)
    calls: list[str] = []
    for name, module in planned.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(f"before {name}"))
        module.register_forward_hook(lambda *_, name=name: calls.append(f"after {name}"))
    num_called = sum(not isinstance(module, nn.ModuleList) for module in planned.modules())
    with applied:
        for step in range(3):
            calls.clear()
            loss = loss_of(planned, step)
            assert len(calls) == len(set(calls)) == 2 * num_called
            calls.clear()
            loss.backward()
            assert calls == []
    assert applied.stats.num_replayed_ops > 0


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_invariant_02_a_router_disturbed_between_forward_and_backward(policy: str) -> None:
    """Weights overwritten behind autograd's back would route other tokens, if anything routed a second time."""

    def run(model: nn.Module, number: int) -> Outcome:
        loss = loss_of(model, number)
        routers = [layer.mlp.gate.weight for layer in model.model.layers]
        inputs = [router.detach().clone() for router in routers]
        forward = [layer.mlp.gate.forward for layer in model.model.layers]
        for layer in model.model.layers:
            layer.mlp.gate.forward = lambda *_: pytest.fail("the router ran again")
        loss.backward()
        for layer, original in zip(model.model.layers, forward, strict=True):
            layer.mlp.gate.forward = original
        assert_same_tensors(dict(enumerate(routers)), dict(enumerate(inputs)))
        return gradients_of(model)

    assert_same_outcome(tiny_qwen3("grouped_mm"), policy, run)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_invariant_04_unpack_is_enough_in_any_order(policy: str) -> None:
    """Outputs of every layer pull on the graph from both ends, and in separate backward passes."""

    def run(model: nn.Module, number: int) -> Outcome:
        hidden = model(**token_batch(number), output_hidden_states=True).hidden_states
        total = {}
        for index in (1, 2, 0):
            hidden[index].square().sum().backward(retain_graph=True)
            total |= {f"{index} {name}": each for name, each in gradients_of(model).items()}
        return total

    assert_same_outcome(tiny_qwen3(), policy, run)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_invariant_05_gradients_taken_inside_a_region(policy: str) -> None:
    class Slope(nn.Module):
        """Adds the gradient of its own energy, for a differentiable inner step."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: Tensor) -> Tensor:
            inner = hidden * 1
            energy = torch.tanh(self.linear(inner)).exp().sum()
            (slope,) = grad(energy, inner, create_graph=True)
            return torch.sin(hidden) - 0.1 * slope

    def run(model: nn.Module, number: int) -> Outcome:
        model(features(4, 8, seed=number).requires_grad_()).square().mean().backward()
        return gradients_of(model)

    assert_same_outcome(Stack(Slope(), Slope()), policy, run, regions=["blocks.0", "blocks.1"])


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_invariant_05_torch_checkpoint_inside_a_region(policy: str) -> None:
    class Checkpointed(GatedBlock):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, hidden.sin(), use_reentrant=False).tanh().exp()

    def run(model: nn.Module, number: int) -> Outcome:
        model(features(4, 8, seed=number)).square().mean().backward()
        return gradients_of(model)

    assert_same_outcome(Stack(Checkpointed(dropout=0.2)), policy, run, regions=["blocks.0"])


def test_invariant_05_graphs_outlive_the_plan() -> None:
    planned, applied = planned_copy(Stack(GatedBlock(), GatedBlock(1)), "full", regions=["blocks.0", "blocks.1"])
    unplanned = Stack(GatedBlock(), GatedBlock(1))
    inputs = features(4, 8)
    planned(inputs).sum().backward()
    planned.zero_grad()
    loss = planned(inputs).sum()
    applied.remove()
    loss.backward()
    unplanned(inputs).sum().backward()
    assert_same_tensors(gradients_of(planned), gradients_of(unplanned))


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_invariant_05_no_op_is_replayed_twice_in_a_step(qwen3: nn.Module, policy: str) -> None:
    planned, applied = planned_copy(qwen3, policy)
    with applied:
        for step in range(4):
            before = applied.stats.num_replayed_ops
            loss_of(planned, step).backward()
            stats = applied.stats
            assert stats.num_replayed_ops - before == sum(region.num_ops_on_tape for region in stats.regions)


def test_a_chain_of_more_than_a_thousand_ops() -> None:
    class Deep(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            for _ in range(1500):
                hidden = torch.sin(hidden) * 1.01
            return hidden

    planned, applied = planned_copy(Stack(Deep()), "full", regions=["blocks.0"])
    unplanned = Stack(Deep())
    with applied:
        for mine, theirs in zip(stack_steps(planned), stack_steps(unplanned), strict=True):
            assert_same_bits(mine.gradients["input"], theirs.gradients["input"])
    assert applied.stats.regions[0].num_ops_on_tape >= 2998
