"""Code that torch cannot see into: autograd Functions, registered or not, and custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Outcome,
    Stack,
    assert_same_outcome,
    assert_same_steps,
    assert_stack_unchanged,
    block_names,
    features,
    gradients_of,
    planned_copy,
    stack_steps,
    two_blocks,
)
from torch import Tensor, nn
from torch.autograd import Function

from actmem.planning import Action, Plan, Rule
from actmem.runtime import apply, functions, register_replayable

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")

POLICIES = ("none", "full", "selective")


@register_replayable
class GatedOld(Function):
    """Saves intermediates of its own, as ctx-style Functions do; counts its calls."""

    num_forwards = 0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, scale: float) -> Tensor:
        GatedOld.num_forwards += 1
        product, gate = inputs @ weight, torch.empty_like(inputs)
        gate.numpy()[...] = 1 / (1 + np.exp(-product.numpy()))
        ctx.save_for_backward(inputs, weight, product, gate)
        ctx.scale = scale
        return product * gate * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, weight, product, gate = ctx.saved_tensors
        inner = gradient * ctx.scale * (gate + product * gate * (1 - gate))
        return inner @ weight.t(), inputs.t() @ inner, None


@register_replayable
class GatedNew(Function):
    """The same in the style of `setup_context`, its intermediates outputs that nobody differentiates."""

    num_forwards = 0

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        GatedNew.num_forwards += 1
        product, gate = inputs @ weight, torch.empty_like(inputs)
        gate.numpy()[...] = 1 / (1 + np.exp(-product.numpy()))
        return product * gate, product, gate

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, product, gate = output
        ctx.mark_non_differentiable(product, gate)
        ctx.save_for_backward(*inputs, product, gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        inputs, weight, product, gate = ctx.saved_tensors
        inner = gradient * (gate + product * gate * (1 - gate))
        return inner @ weight.t(), inputs.t() @ inner


@register_replayable
class SavesOnDemand(Function):
    """Saves only what the gradients that are asked for need."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        product = inputs * weight
        ctx.save_for_backward(
            weight if ctx.needs_input_grad[0] else None, inputs if ctx.needs_input_grad[1] else None, product
        )
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight, inputs, product, product * 2)
        return product.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, inputs, product, *_ = ctx.saved_tensors
        inner = gradient * product.cos()
        return (
            inner * weight if ctx.needs_input_grad[0] else None,
            (inner * inputs).sum(0) if ctx.needs_input_grad[1] else None,
        )


class PlainBase(Function):
    """A forward that subclasses inherit."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def old_style(block: Any, hidden: Tensor) -> Tensor:
    return GatedOld.apply(hidden.sin(), block.linear.weight, 0.5).tanh() + hidden


def new_style(block: Any, hidden: Tensor) -> Tensor:
    return GatedNew.apply(hidden.sin(), block.linear.weight)[0].tanh() + hidden


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("forward", "function"), [(old_style, GatedOld), (new_style, GatedNew)])
def test_invariant_09_registered_functions_are_one_op(forward: Callable[..., Any], function: Any, policy: str) -> None:
    calls_before = function.num_forwards
    applied = assert_stack_unchanged(two_blocks(forward), policy)
    num_forwards = function.num_forwards - calls_before
    assert num_forwards == 6 + 6 + (6 if policy == "full" else 0), "planned, unplanned, replayed"
    assert (applied.stats.dropped_bytes > 0) == (policy != "none")
    assert "opaque autograd.Function" not in applied.stats.always_saved_bytes


def test_invariant_13_rules_name_registered_functions() -> None:
    for action in Action:
        plan = Plan("by name", (Rule("GatedOld", action),))
        model = two_blocks(old_style)
        planned, applied = planned_copy(model, plan, regions=block_names(model), strict_matching=True)
        before = GatedOld.num_forwards
        with applied:
            assert_same_steps(stack_steps(planned), stack_steps(model))
        assert GatedOld.num_forwards - before == 12 + 6 * (action is Action.RECOMPUTE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_invariant_01_a_function_that_saves_what_its_gradients_need(frozen: bool, policy: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        return SavesOnDemand.apply(block.linear(hidden).sin(), block.scale * 1).exp()

    model = two_blocks(forward, scale=nn.Parameter(features(8)))
    for block in model.blocks:
        block.scale.requires_grad_(not frozen)
    assert_stack_unchanged(model, policy)


def test_invariant_11_functions_get_their_own_forward_back() -> None:
    before = {function: vars(function)["forward"] for function in (GatedOld, GatedNew, SavesOnDemand)}
    model = two_blocks(old_style)
    first = apply(model.blocks[0], "full", regions=[""])
    second = apply(model.blocks[1], "full", regions=[""])
    first.remove()
    first.remove()
    assert vars(GatedOld)["forward"] is not before[GatedOld]
    second.remove()
    assert {function: vars(function)["forward"] for function in before} == before


def test_invariant_11_a_registered_function_that_inherits_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_replayable", dict(functions._replayable))
    inherited = register_replayable(type("Inherited", (PlainBase,), {}))

    def forward(block: Any, hidden: Tensor) -> Tensor:
        return inherited.apply(block.linear(hidden) * 2).exp()

    assert_stack_unchanged(two_blocks(forward), "full")
    assert "forward" not in vars(inherited)


class Opaque(Function):
    """A kernel that no dispatch mode sees fills memory, and saves some of it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, slope = torch.empty_like(inputs), torch.zeros_like(inputs)
        np.sin(inputs.numpy(), out=out.numpy())
        np.cos(inputs.numpy(), out=slope.numpy())
        ctx.save_for_backward(slope)
        return out, out * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return (first + 2 * second) * ctx.saved_tensors[0]


class Nested(Function):
    """Runs torch operators and another Function, and gives back views of what it made."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = inputs.detach().requires_grad_()
            out = torch.tanh(leaf * 2) * Opaque.apply(leaf)[0]
            (slope,) = torch.autograd.grad(out.sum(), leaf)
        ctx.save_for_backward(slope)
        both = torch.stack((out.detach(), slope))
        ctx.mark_non_differentiable(both)
        return out.detach(), both

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_09_opaque_functions_are_not_replayed(policy: str, verify: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        first, second = Opaque.apply(block.linear(hidden) * 2)
        return first.exp() * second.view(2, 16).sin().view(4, 8)

    model = two_blocks(forward)
    planned, applied = planned_copy(model, policy, regions=block_names(model), verify=verify)
    with applied:
        assert_same_steps(stack_steps(planned), stack_steps(model))


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_09_a_function_that_turns_gradients_on_within(policy: str, verify: str) -> None:
    """Whether gradients are on does not tell whether a Function runs."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        out, both = Nested.apply(block.linear(hidden).sin())
        return out.exp() * both[1]

    model = two_blocks(forward)
    planned, applied = planned_copy(model, policy, regions=block_names(model), verify=verify)
    with applied:
        assert_same_steps(stack_steps(planned), stack_steps(model))


class HiddenKernelWithGradients(Function):
    """A Function that works with gradients on and whose kernel nobody sees."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            doubled = inputs * 2
        doubled.numpy()[...] += 1
        ctx.save_for_backward(doubled)
        return doubled * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_09_a_hidden_kernel_where_gradients_are_on(policy: str, verify: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        return HiddenKernelWithGradients.apply(block.linear(hidden).sin()).cos()

    model = two_blocks(forward)
    planned, applied = planned_copy(model, policy, regions=block_names(model), verify=verify)
    with applied:
        assert_same_steps(stack_steps(planned), stack_steps(model))


@torch.library.custom_op("actmem_tests::swish", mutates_args=())
def swish(inputs: Tensor, beta: float) -> Tensor:
    swish.num_calls = getattr(swish, "num_calls", 0) + 1
    return torch.from_numpy(inputs.numpy() / (1 + np.exp(-beta * inputs.numpy())))


def _keep_for_swish(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.beta = inputs[1]


def _backward_of_swish(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    inputs, output = ctx.saved_tensors
    gate = torch.sigmoid(ctx.beta * inputs)
    return gradient * (gate + ctx.beta * output * (1 - gate)), None


swish.register_autograd(_backward_of_swish, setup_context=_keep_for_swish)


@torch.library.custom_op("actmem_tests::add_one_", mutates_args=("target",))
def add_one_(target: Tensor) -> None:
    target.numpy()[...] += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_01_custom_operators(policy: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        return swish(block.linear(hidden).sin(), 1.5).exp() * hidden

    before = getattr(swish, "num_calls", 0)
    applied = assert_stack_unchanged(two_blocks(forward), policy)
    num_replays = swish.num_calls - before - 12
    assert num_replays == (6 if policy == "full" else 0), "selective never runs a custom operator again"
    assert (applied.stats.dropped_bytes > 0) == (policy != "none")


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_06_custom_operators_that_edit(policy: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        scale = block.scale * 2
        before = scale.sin()
        add_one_(scale)
        return block.linear(hidden) * before * scale

    assert_stack_unchanged(two_blocks(forward, scale=features(8)), policy)


class EditsWhatItSaved(Function):
    """Reuses saved memory in its backward pass, as memory-saving kernels do; `unseen`: torch is not told."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, unseen: bool) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.unseen = unseen
        return inputs.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inputs,) = ctx.saved_tensors
        slope = inputs.cos()
        if ctx.unseen:
            inputs.numpy()[...] = 7.0
        else:
            inputs.fill_(7.0)
        return gradient * slope, None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unseen", [False, True], ids=["seen by torch", "unseen"])
def test_invariant_01_a_backward_that_reuses_its_saved_memory(unseen: bool, policy: str) -> None:
    """Nobody else saved that tensor, so without a plan all is well, whatever else was made from it."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden) * 0.5
        square = (inner + 1).square()
        return (square + EditsWhatItSaved.apply(inner, unseen)).tanh()

    model = two_blocks(forward)
    planned, applied = planned_copy(model, policy, regions=block_names(model), verify="off")
    with applied:
        assert_same_steps(stack_steps(planned), stack_steps(model))


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_02_full_backward_hooks_on_modules_inside(policy: str) -> None:
    calls: list[str] = []

    def run(model: nn.Module, number: int) -> Outcome:
        calls.clear()
        linear = model.blocks[0].linear
        handles = [
            linear.register_full_backward_hook(lambda *_: calls.append("backward")),
            linear.register_forward_hook(lambda *_: calls.append("forward")),
        ]
        model(features(4, 8, seed=number).requires_grad_()).square().mean().backward()
        for handle in handles:
            handle.remove()
        assert calls == ["forward", "backward"]
        return gradients_of(model)

    model = Stack(FunctionBlock(lambda block, hidden: block.linear(hidden.sin()).exp().clamp(max=3)))
    assert_same_outcome(model, policy, run, regions=["blocks.0"])
