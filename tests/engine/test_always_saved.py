"""What cannot be made again with certainty is saved under every plan, and the report says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Stack,
    assert_same_steps,
    assert_stack_unchanged,
    planned_copy,
    stack_steps,
    tiny_qwen3,
    token_batch,
    two_blocks,
)
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from actmem.runtime import register_subclass
from actmem.runtime.kinds import kind_of

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")

SIZE = 4 * 8 * 4


def integers(block: Any, hidden: Tensor) -> Tensor:
    rows = hidden.sum(1).argsort()
    return block.linear(hidden)[rows].sin() * (hidden > 0)


def random_numbers(block: Any, hidden: Tensor) -> Tensor:
    return block.linear(hidden).sin() * torch.rand(4, 8) * torch.randn_like(hidden).exp()


def dropout(block: Any, hidden: Tensor) -> Tensor:
    return functional.dropout(block.linear(hidden).sin(), 0.5).exp()


def own_generator(block: Any, hidden: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return block.linear(hidden).sin() * torch.rand(4, 8, generator=generator)


def edited(block: Any, hidden: Tensor) -> Tensor:
    return block.linear(hidden).mul_(2).sin()


def uninitialised(block: Any, hidden: Tensor) -> Tensor:
    """Memory that a kernel of somebody else fills."""
    scale = torch.empty(4, 8)
    scale.numpy()[...] = 0.5
    return block.linear(hidden).sin() * scale


class Opaque(torch.autograd.Function):
    """Fills memory by numpy, as a compiled kernel would."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        doubled, out = inputs * 2, torch.empty_like(inputs)
        out.numpy()[...] = doubled.numpy() + 1
        ctx.save_for_backward(doubled, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        doubled, out = ctx.saved_tensors
        return gradient * (out - doubled) * 2


def opaque(block: Any, hidden: Tensor) -> Tensor:
    return Opaque.apply(block.linear(hidden).sin()).exp()


@pytest.mark.parametrize(
    ("forward", "reason", "num_bytes"),
    [
        (integers, "integer or bool", 4 * 8 + 4 * 8),
        (random_numbers, "random", 2 * SIZE),
        (dropout, "edited in place", SIZE),  # on the CPU a mask is filled in place
        (own_generator, "random", SIZE),
        (edited, "edited in place", SIZE),
        (uninitialised, "uninitialised memory", SIZE),
        (opaque, "opaque autograd.Function", 2 * SIZE),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_invariant_09_kept_and_reported(forward: Callable[..., Any], reason: str, num_bytes: int) -> None:
    applied = assert_stack_unchanged(Stack(FunctionBlock(forward)), "full")
    kept = applied.stats.always_saved_bytes
    assert reason in kept, kept
    assert kept[reason] <= num_bytes + SIZE
    assert kept[reason] >= min(num_bytes, SIZE)


CASES = [integers, random_numbers, dropout, own_generator, edited, uninitialised, opaque]


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("forward", CASES, ids=lambda each: each.__name__)
def test_invariant_09_the_same_numbers_all_the_same(forward: Callable[..., Any], policy: str) -> None:
    assert_stack_unchanged(two_blocks(forward), policy)


def overloads() -> Iterator[Any]:
    """Every overload of every ATen op."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                yield getattr(packet, overload)


def test_invariant_09_no_op_that_draws_random_numbers_is_replayed() -> None:
    replayable = [
        str(each)
        for each in overloads()
        if any(argument.name == "generator" for argument in each._schema.arguments)
        and kind_of(each).kept is None
        and kind_of(each).dropout is None
    ]
    assert replayable == []


def test_invariant_09_no_op_that_edits_an_operand_is_replayed() -> None:
    replayable = [str(each) for each in overloads() if each._schema.is_mutable and kind_of(each).kept is None]
    assert replayable == []


def test_invariant_09_no_op_that_returns_uninitialised_memory_is_replayed() -> None:
    names = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
    replayable = [
        str(each)
        for each in overloads()
        if each._schema.name.removeprefix("aten::") in names and kind_of(each).kept is None
    ]
    assert replayable == []


def test_invariant_09_attention_is_random_exactly_with_dropout() -> None:
    flash = kind_of(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    query = torch.ones(1, 1, 2, 2)
    assert not flash.is_random((query, query, query), {})
    assert not flash.is_random((query, query, query, 0.0), {})
    assert flash.is_random((query, query, query, 0.1), {})
    assert flash.is_random((query, query, query), {"dropout_p": 0.1})


def test_invariant_09_routing_ids_are_kept_and_cost_little() -> None:
    planned, applied = planned_copy(tiny_qwen3("grouped_mm"), "full")
    with applied:
        for step in range(3):
            planned(**token_batch(step)).loss.backward()
    kept = applied.stats.always_saved_bytes
    assert 0 < kept["integer or bool"] < applied.stats.dropped_bytes / 5
    assert set(kept) <= {"integer or bool", "edited in place", "uninitialised memory", "opaque autograd.Function"}


class Counting(Tensor):
    """A tensor that counts what is done to it: state that a replay would disturb."""

    num_ops = 0
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Counting:
        out = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.num_ops += 1
        plain = tree_map_only(Counting, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Counting, func(*plain[0], **plain[1]))


class CountingToo(Counting):
    """One that is registered as free of consequences."""


@pytest.mark.parametrize("kind", [Counting, CountingToo])
def test_invariant_09_tensor_subclasses_are_saved_unless_registered(kind: type[Counting]) -> None:
    register_subclass(CountingToo)
    replayed = {}
    gradients = {}

    def forward(block: Any, hidden: Tensor) -> Tensor:
        return torch.exp(torch.sin(hidden * 2) * 0.5)

    planned, applied = planned_copy(Stack(FunctionBlock(forward)), "full", regions=["blocks.0"], verify="off")
    with applied:
        for number in range(3):
            plain = torch.ones(4, 8).requires_grad_()
            wrapped = kind(plain.detach()).requires_grad_()
            for name, each in (("plain", plain), (kind.__name__, wrapped)):
                before = applied.stats.num_replayed_ops
                out = planned(each)
                (gradients[name],) = torch.autograd.grad(out, each, torch.ones_like(out))
                replayed[name] = applied.stats.num_replayed_ops - before
            assert torch.equal(gradients[kind.__name__].inner, gradients["plain"]), number
    assert replayed["plain"] > 0
    assert (replayed[kind.__name__] > 0) == (kind is CountingToo)


@pytest.mark.parametrize("verify", ["always", "off"])
def test_invariant_09_a_script_does_not_outvote_what_an_op_has_become(verify: str) -> None:
    """The same ops in the same order, but from the third call on inside a Function that torch cannot see into."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            doubled = inputs * 2
            doubled.numpy()[...] += 1
            ctx.save_for_backward(doubled)
            return doubled

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (doubled,) = ctx.saved_tensors
            return gradient * doubled

    def forward(block: Any, hidden: Tensor) -> Tensor:
        block.num_calls += 1
        inner = block.linear(hidden).sin()
        return (Hidden.apply(inner) if block.num_calls > 2 else inner * 2).cos()

    model = Stack(FunctionBlock(forward, num_calls=0))
    planned, applied = planned_copy(model, "full", regions=["blocks.0"], verify=verify)
    with applied:
        assert_same_steps(stack_steps(planned, num_steps=5), stack_steps(model, num_steps=5))
