"""With the garbage collector off, memory returns to its floor after every step, whatever became of the step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planned_runs import (
    POLICIES,
    FunctionBlock,
    Stack,
    block_names,
    features,
    language_loss,
    planned_copy,
    tiny_qwen3,
    token_batch,
    two_blocks,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from actmem.errors import InPlaceEditError
from actmem.runtime import apply

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class BirthRegister(TorchDispatchMode):
    """Weak references to every tensor that an op makes, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self.made.append(weakref.ref(each))
        return out

    def alive(self) -> list[Tensor]:
        return [tensor for reference in self.made if (tensor := reference()) is not None]


BATCH = token_batch()


def tensors_alive() -> tuple[int, int]:
    """Number and bytes of all tensors that Python can see."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return len(tensors), sum(each.untyped_storage().nbytes() for each in tensors)


def whole_step(model: nn.Module) -> None:
    language_loss(BATCH)(model).backward()


def backward_never_runs(model: nn.Module) -> None:
    language_loss(BATCH)(model)


def graph_is_retained(model: nn.Module) -> None:
    loss = language_loss(BATCH)(model)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def gradient_of_a_part(model: nn.Module) -> None:
    loss = language_loss(BATCH)(model)
    torch.autograd.grad(loss, model.model.layers[1].self_attn.q_proj.weight)


def forward_raises(model: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        whole_step(model)
    handle.remove()


def backward_raises(model: nn.Module) -> None:
    hidden = model(**BATCH, output_hidden_states=True).hidden_states
    hidden[1].register_hook(fail_in_backward)
    with pytest.raises(ValueError, match="on purpose"):
        hidden[2].sum().backward()


def fail_in_backward(gradient: Tensor) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "step",
    [whole_step, backward_never_runs, graph_is_retained, gradient_of_a_part, forward_raises, backward_raises],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("family", ["dense", "eager"])
def test_invariant_10_every_tensor_of_a_step_dies_with_it(family: str, step: Callable[..., None], policy: str) -> None:
    planned, applied = planned_copy(tiny_qwen3(family), policy)
    with applied:
        for _ in range(4):
            with BirthRegister() as births:
                step(planned)
            planned.zero_grad()
            assert len(births.made) > 50
            assert [tuple(each.shape) for each in births.alive()] == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("verify", "num_steps"), [("first", 200), ("always", 50)])
def test_invariant_10_many_steps_end_where_they_began(verify: str, num_steps: int, policy: str) -> None:
    model = tiny_qwen3(num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    planned, applied = planned_copy(model, policy, verify=verify)
    floors = []
    with applied:
        for step in range(1, num_steps + 1):
            whole_step(planned)
            planned.zero_grad()
            if step % (num_steps // 5) == 0:
                floors.append(tensors_alive())
    assert floors == [floors[0]] * 5


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_invariant_10_saved_outputs_and_functions_make_no_cycle(policy: str) -> None:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            out = inputs * inputs
            ctx.save_for_backward(inputs, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient * ctx.saved_tensors[0]

    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = torch.exp(torch.tanh(block.linear(hidden)))
        masked = torch.nn.functional.dropout(Squared.apply(inner.sigmoid()), 0.2)
        masked[0].mul_(2)
        return torch.sigmoid(masked).softmax(-1)

    model = two_blocks(forward)
    planned, applied = planned_copy(model, policy, regions=block_names(model))
    with applied:
        for backward in (True, False) * 3:
            with BirthRegister() as births:
                loss = planned(features(4, 8)).sum()
                if backward:
                    loss.backward()
                del loss
            planned.zero_grad()
            assert births.made and births.alive() == []


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_invariant_10_a_refused_edit_leaves_nothing_behind(policy: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden).sin() * 2
        out = inner.tanh() * inner
        inner.add_(1)
        return out

    planned, applied = planned_copy(Stack(FunctionBlock(forward)), policy, regions=["blocks.0"])
    with applied:
        for _ in range(4):
            with BirthRegister() as births:
                loss = planned(features(4, 8)).sum()
                with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                    loss.backward()
                assert policy == "none" or isinstance(caught.value, InPlaceEditError)
                del loss, caught
            planned.zero_grad()
            assert births.alive() == []


@pytest.mark.parametrize("policy", ["full", "mlp", "selective"])
def test_invariant_05_a_dropped_loss_frees_what_its_graph_held(policy: str) -> None:
    """Not at the end of a function or by the collector, but with the last reference to the loss."""
    planned, applied = planned_copy(tiny_qwen3(), policy)
    with applied:
        for _ in range(3):
            with BirthRegister() as births:
                loss = language_loss(BATCH)(planned)
            held = len(births.alive())
            assert held > 0
            del loss
            assert births.alive() == []


@pytest.mark.parametrize("learned", [False, True], ids=["learning", "learned"])
def test_dropped_tensors_are_freed_by_the_end_of_the_forward(learned: bool) -> None:
    """What a plan says it drops is gone: a chain that would keep thirty tensors keeps its input."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        for _ in range(15):
            hidden = torch.tanh(hidden.sin())
        return hidden + 1

    planned, applied = planned_copy(Stack(FunctionBlock(forward)), "full", regions=["blocks.0"], verify="off")
    inputs = features(4, 8).requires_grad_()
    with applied:
        if learned:
            planned(inputs).sum().backward()
        with BirthRegister() as births:
            out = planned(inputs)
        sizes = [tuple(each.shape) for each in births.alive() if each.untyped_storage().nbytes()]
        assert len(sizes) <= 3, "the output, and aliases of the input"
        out.sum().backward()
        out = out.detach()
        del out
        assert all(each.data_ptr() in (inputs.data_ptr(), inputs.grad.data_ptr(), 0) for each in births.alive())


def test_replayed_tensors_are_freed_as_the_backward_goes() -> None:
    """Half-way through a backward pass only what is still to be read stands in memory."""
    length = 40
    counts: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            counts.append(len({each.untyped_storage()._cdata for each in births.alive()}))
            return gradient

    def forward(block: Any, hidden: Tensor) -> Tensor:
        for position in range(length):
            hidden = torch.tanh(hidden * 1.1)
            if position == 1:
                hidden = Probe.apply(hidden)
        return hidden

    planned, applied = planned_copy(Stack(FunctionBlock(forward)), "full", regions=["blocks.0"], verify="off")
    with applied:
        for _ in range(3):
            births = BirthRegister()
            loss = planned(features(4, 8).requires_grad_()).sum()
            with births:
                loss.backward()
            del loss
    assert counts[-1] < length / 2


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_11_a_planned_model_can_be_thrown_away(policy: str) -> None:
    original = Qwen3DecoderLayer.forward
    planned, applied = planned_copy(tiny_qwen3(), policy)
    assert Qwen3DecoderLayer.forward is not original
    for _ in range(2):
        whole_step(planned)
    reference, layer = weakref.ref(planned), weakref.ref(planned.model.layers[0])
    del planned
    gc.collect()
    assert reference() is None and layer() is None
    assert Qwen3DecoderLayer.forward is original, "nobody is left who needs the wrapper"
    applied.remove()


def test_invariant_11_a_model_whose_forward_was_patched_can_be_thrown_away() -> None:
    block = FunctionBlock(lambda block, hidden: block.linear(hidden).tanh())
    block.forward = block.forward
    applied = apply(block, "full", regions=[""])
    block(features(4, 8)).sum().backward()
    reference = weakref.ref(block)
    del block
    gc.collect()
    assert reference() is None
    applied.remove()
