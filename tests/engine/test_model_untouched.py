"""The model stays the user's: under a plan it looks, copies and saves as without one, and `remove` leaves no trace."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_runs import (
    POLICIES,
    FunctionBlock,
    Stack,
    assert_same_outcome,
    assert_same_steps,
    assert_same_tensors,
    features,
    gradients_of,
    language_loss,
    language_steps,
    planned_copy,
    stack_steps,
    tiny_qwen3,
    token_batch,
)
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from actmem.errors import ApplyError
from actmem.runtime import apply, functions

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")


def saved_whole(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that a user can tell of a model without running it."""
    return {
        "state": {name: each.clone() for name, each in model.state_dict().items()},
        "parameters": [(name, id(each)) for name, each in model.named_parameters()],
        "buffers": [(name, id(each)) for name, each in model.named_buffers()],
        "modules": [(name, type(each), id(each)) for name, each in model.named_modules()],
        "attributes": {name: sorted(vars(each)) for name, each in model.named_modules()},
        "hooks": [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()],
        "repr": repr(model),
        "signature": str(inspect.signature(model.model.layers[0].forward)),
        "document": model.model.layers[0].forward.__doc__,
    }


def assert_same_portraits(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert_same_tensors(mine.pop("state"), theirs.pop("state"))
    assert mine == theirs


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_11_nothing_shows(qwen3: nn.Module, policy: str) -> None:
    before, pickled, saved = portrait(qwen3), pickle.dumps(qwen3), saved_whole(qwen3)
    with apply(qwen3, policy):
        assert_same_portraits(portrait(qwen3), dict(before))
        assert pickle.dumps(qwen3) == pickled
        assert saved_whole(qwen3) == saved
        for step in range(2):
            language_loss(token_batch(step))(qwen3).backward()
        qwen3.zero_grad()
        assert pickle.dumps(qwen3) == pickled
    before["state"] = {name: each.clone() for name, each in qwen3.state_dict().items()}
    assert_same_portraits(portrait(qwen3), before)
    assert saved_whole(qwen3) == saved


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_11_remove_restores_classes_exactly(qwen3: nn.Module, policy: str) -> None:
    before = dict(vars(Qwen3DecoderLayer))
    applied = apply(qwen3, policy)
    language_loss(token_batch())(qwen3).backward()
    assert vars(Qwen3DecoderLayer)["forward"] is not before["forward"]
    applied.remove()
    assert dict(vars(Qwen3DecoderLayer)) == before
    applied.remove()
    assert dict(vars(Qwen3DecoderLayer)) == before


def test_invariant_11_remove_restores_a_class_that_inherits_its_forward() -> None:
    class Heir(FunctionBlock):
        pass

    block = Heir(lambda block, hidden: block.linear(hidden).tanh())
    with apply(block, "full", regions=[""]) as applied:
        assert "forward" in vars(Heir)
        block(features(4, 8)).sum().backward()
        assert applied.stats.num_replayed_ops > 0
    assert "forward" not in vars(Heir)


def test_invariant_11_a_parent_class_that_is_planned_too() -> None:
    """`super().forward` inside a planned subclass is part of its own call, not a call of its own."""

    class Heir(FunctionBlock):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden.sin()) * 2

    def function(block: Any, hidden: Tensor) -> Tensor:
        return block.linear(hidden).tanh().exp()

    model = Stack(FunctionBlock(function), Heir(function, seed=1))
    planned, applied = planned_copy(model, "full", regions=["blocks.0", "blocks.1"])
    with applied:
        assert_same_steps(stack_steps(planned), stack_steps(model))
    assert [region.num_calls for region in applied.stats.regions] == [3, 3]


def test_invariant_11_plans_on_two_models_of_a_class_come_and_go_in_any_order() -> None:
    original = vars(Qwen3DecoderLayer)["forward"]
    first, second, third = tiny_qwen3(), tiny_qwen3(), tiny_qwen3()
    expected = language_steps(third, [token_batch()])
    one, two = apply(first, "full"), apply(second, "selective")
    one.remove()
    assert vars(Qwen3DecoderLayer)["forward"] is not original
    assert_same_steps(language_steps(first, [token_batch()]), expected)
    assert_same_steps(language_steps(second, [token_batch()]), expected)
    assert one.stats.num_replayed_ops == 0 < two.stats.num_replayed_ops
    two.remove()
    assert vars(Qwen3DecoderLayer)["forward"] is original


def test_invariant_12_only_the_planned_one_of_two_models_is_touched() -> None:
    planned, plain = tiny_qwen3(), tiny_qwen3()
    with apply(planned, "full"):
        seen = spy_on_hooks(plain)
        seen_planned = spy_on_hooks(planned)
    assert seen == {"modes": 0, "saved_tensors_hooks": False, "module_hooks": 0}
    assert seen_planned["modes"] == 1 and seen_planned["saved_tensors_hooks"]


def spy_on_hooks(model: nn.Module) -> dict[str, Any]:
    """What is switched on while the second layer runs in the third step."""
    seen: dict[str, Any] = {}

    def spy(*_: Any) -> None:
        seen["modes"] = torch._C._len_torch_dispatch_stack()
        seen["saved_tensors_hooks"] = torch._C._autograd._saved_tensors_hooks_is_enabled() and saves_through_hooks()
        seen["module_hooks"] = len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks)

    handle = model.model.layers[1].mlp.register_forward_pre_hook(spy)
    for step in range(3):
        language_loss(token_batch(step))(model).backward()
    handle.remove()
    return seen


def saves_through_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def test_invariant_12_off_is_off(qwen3: nn.Module) -> None:
    off = {"modes": 0, "saved_tensors_hooks": False, "module_hooks": 0}
    assert spy_on_hooks(qwen3) == off
    with apply(qwen3, "none") as applied:
        assert spy_on_hooks(qwen3) == off, "a policy that recomputes nothing costs nothing once that is known"
        assert applied.stats.num_replayed_ops == 0
    with apply(qwen3, "full"):
        assert spy_on_hooks(qwen3) != off
    assert spy_on_hooks(qwen3) == off
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
    assert torch._C._len_torch_dispatch_stack() == 0 and not saves_through_hooks()


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_invariant_11_a_deep_copy_is_a_plain_model(qwen3: nn.Module, policy: str) -> None:
    expected = language_steps(copy.deepcopy(qwen3), [token_batch()])
    with apply(qwen3, policy) as applied:
        language_loss(token_batch())(qwen3).backward()
        qwen3.zero_grad()
        twin = copy.deepcopy(qwen3)
        before = applied.stats.num_replayed_ops
        assert_same_steps(language_steps(twin, [token_batch()]), expected)
        assert applied.stats.num_replayed_ops == before, "the copy is not planned"
        with apply(twin, "full") as again:
            language_loss(token_batch())(twin).backward()
            assert again.stats.num_replayed_ops > 0


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_invariant_11_a_state_saved_under_a_plan_loads_without_one_and_back(policy: str) -> None:
    first, second = tiny_qwen3(), tiny_qwen3()
    with torch.no_grad():
        second.lm_head.weight.mul_(2)
    batch = [token_batch()]
    with apply(first, policy):
        language_steps(first, batch)
        second.load_state_dict(first.state_dict(), strict=True)
    with apply(second, "none"):
        assert_same_steps(language_steps(second, batch), language_steps(first, batch))


def scaled_forward(module: nn.Module, *args: Any, scale: float = 2.0, **kwargs: Any) -> Any:
    """A forward of somebody else's, as libraries put on instances."""
    return type(module).forward(module, *args, **kwargs) * scale


def bound_method(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(scaled_forward, module)


def wrapping_the_old_one(module: nn.Module) -> Callable[..., Any]:
    old = module.forward

    @functools.wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) * 3

    return forward


def partial(module: nn.Module) -> Callable[..., Any]:
    return functools.partial(scaled_forward, module, scale=0.5)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("patch", [bound_method, wrapping_the_old_one, partial], ids=lambda each: each.__name__)
def test_invariant_11_a_forward_patched_on_the_instance(patch: Callable[..., Any], policy: str) -> None:
    def build() -> nn.Module:
        model = tiny_qwen3()
        for layer in model.model.layers:
            layer.forward = patch(layer)
        return model

    planned, plain = build(), build()
    patched = [vars(layer)["forward"] for layer in planned.model.layers]
    applied = apply(planned, policy, memory={"verify": "always"})
    assert_same_steps(
        language_steps(planned, [token_batch(step) for step in range(3)]),
        language_steps(plain, [token_batch(step) for step in range(3)]),
    )
    assert [region.num_calls for region in applied.stats.regions] == [3, 3]
    assert (applied.stats.dropped_bytes > 0) == (policy != "none")
    applied.remove()
    assert [vars(layer)["forward"] for layer in planned.model.layers] == patched
    assert all(
        now is then for now, then in zip((vars(x)["forward"] for x in planned.model.layers), patched, strict=True)
    )


def test_invariant_11_a_deep_copy_of_a_patched_instance_runs_on_its_own_weights() -> None:
    """A bound method is copied with the module it is bound to."""
    model = tiny_qwen3()
    for layer in model.model.layers:
        layer.forward = bound_method(layer)

    def stays_apart(twin: nn.Module) -> None:
        with torch.no_grad():
            for layer in twin.model.layers:
                layer.mlp.down_proj.weight.zero_()
        loss = language_loss(token_batch())(twin)
        assert not torch.equal(loss, language_loss(token_batch())(model))
        loss.backward()
        assert twin.model.layers[0].mlp.down_proj.weight.grad is not None

    stays_apart(copy.deepcopy(model))
    with apply(model, "full"):
        stays_apart(copy.deepcopy(model))


def test_invariant_11_a_patched_instance_pickles_as_before() -> None:
    model = tiny_qwen3()
    for layer in model.model.layers:
        layer.forward = bound_method(layer)
    before = pickle.dumps(model)
    with apply(model, "full"):
        assert pickle.dumps(model) == before


def test_invariant_11_applying_twice_is_refused(qwen3: nn.Module) -> None:
    with apply(qwen3, "full") as applied:
        with pytest.raises(ApplyError, match="under a plan already"):
            apply(qwen3, "selective")
        with pytest.raises(ApplyError, match="under a plan already"):
            apply(qwen3.model.layers[1], "full", regions=[""])
        language_loss(token_batch())(qwen3).backward()
        assert applied.stats.num_replayed_ops > 0
    with apply(qwen3, "selective"):
        language_loss(token_batch())(qwen3).backward()


def test_invariant_11_nested_regions_are_refused(qwen3: nn.Module) -> None:
    before = vars(Qwen3DecoderLayer)["forward"]
    with pytest.raises(ApplyError, match=r"model.layers.0.mlp lies inside region model.layers.0"):
        apply(qwen3, "full", regions=["model.layers.0", "model.layers.0.mlp"])
    with pytest.raises(ApplyError, match="lies inside"):
        apply(qwen3, "full", regions=[qwen3, qwen3.model.layers[1]])
    assert vars(Qwen3DecoderLayer)["forward"] is before


def test_invariant_11_regions_nested_under_another_name_are_refused() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = FunctionBlock(lambda block, hidden: block.linear(hidden).tanh())
            self.shortcut, self.stack = inner, Stack(inner)

    model = Aliased()
    with pytest.raises(ApplyError, match="inside"):
        apply(model, "full", regions=["shortcut", "stack"])


def test_invariant_11_a_region_that_runs_inside_another_all_the_same() -> None:
    """Called through a reference that is no submodule, so nothing could refuse it beforehand."""

    def outer(block: Any, hidden: Tensor) -> Tensor:
        return block.others[0](hidden.sin()).exp() * block.linear(hidden).tanh()

    def inner(block: Any, hidden: Tensor) -> Tensor:
        return torch.tanh(block.linear(hidden).sin() * hidden)

    def build() -> nn.Module:
        first = FunctionBlock(inner)
        return Stack(first, FunctionBlock(outer, seed=1, others=[first]))

    for policy in ("full", "selective"):
        planned, plain = build(), build()
        with apply(planned, policy, regions=["blocks.0", "blocks.1"], memory={"verify": "always"}):
            assert_same_steps(stack_steps(planned), stack_steps(plain))


@pytest.mark.parametrize(
    "regions", [["model.layers.7"], [], [nn.Linear(2, 2)]], ids=["no such name", "none", "foreign"]
)
def test_invariant_13_regions_that_are_not_there_are_refused(qwen3: nn.Module, regions: Any) -> None:
    with pytest.raises(ApplyError, match="named_modules"):
        apply(qwen3, "full", regions=regions)


def test_a_refused_apply_leaves_the_model_as_it_was(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if what fails is the last thing that `apply` does."""

    def fail(*_: Any) -> None:
        raise OSError("on purpose")

    before = vars(Qwen3DecoderLayer)["forward"]
    monkeypatch.setattr(functions.FunctionWrappers, "install", fail)
    with pytest.raises(OSError, match="on purpose"):
        apply(qwen3, "full")
    monkeypatch.undo()
    assert vars(Qwen3DecoderLayer)["forward"] is before
    with apply(qwen3, "full"):
        model_step(qwen3)


def test_compiled_models_are_refused(qwen3: nn.Module) -> None:
    with pytest.raises(ApplyError, match=r"torch\.compile"):
        apply(torch.compile(qwen3, backend="eager"), "full")
    qwen3.model.layers[1].compile(backend="eager")
    with pytest.raises(ApplyError, match=r"model.layers.1 went through torch.compile"):
        apply(qwen3, "full")


def test_compiling_a_planned_model_is_refused() -> None:
    block = FunctionBlock(lambda block, hidden: block.linear(hidden).tanh())
    with apply(block, "full", regions=[""]):
        compiled = torch.compile(block, backend="eager")
        with warnings.catch_warnings(), pytest.raises(Exception, match="plan"):
            warnings.simplefilter("ignore")
            compiled(features(4, 8)).sum().backward()
    torch._dynamo.reset()


def switch_checkpointing(model: nn.Module, on: bool, **settings: Any) -> None:
    """Hugging Face's own, under the name that it has by now."""
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if on:
        getattr(model, f"{name}_enable")(**({f"{name}_kwargs": settings} if settings else {}))
    else:
        getattr(model, f"{name}_disable")()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hugging_face_checkpointing_is_refused_before_and_after(qwen3: nn.Module, use_reentrant: bool) -> None:
    switch_checkpointing(qwen3, True, use_reentrant=use_reentrant)
    with pytest.raises(ApplyError, match="checkpointing_disable"):
        apply(qwen3, "full")
    switch_checkpointing(qwen3, False)
    with apply(qwen3, "full"):
        switch_checkpointing(qwen3, True, use_reentrant=use_reentrant)
        with pytest.raises(ApplyError, match="checkpointing_disable"):
            model_step(qwen3)
        switch_checkpointing(qwen3, False)
        model_step(qwen3)
    switch_checkpointing(qwen3, True, use_reentrant=use_reentrant)
    model_step(qwen3)


def test_invariant_11_hugging_face_checkpointing_of_another_model_goes_on() -> None:
    planned, other = tiny_qwen3(), tiny_qwen3()
    switch_checkpointing(other, True, use_reentrant=False)
    calls: list[str] = []
    other.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    model_step(other)
    assert calls == ["mlp", "mlp"], "once in the forward and once in the backward pass"
    with apply(planned, "full"):
        model_step(other)
    assert calls == ["mlp"] * 4


def model_step(model: nn.Module) -> None:
    embeddings = model.model.embed_tokens(token_batch()["input_ids"])
    model(inputs_embeds=embeddings, labels=token_batch()["labels"]).loss.backward()


def test_invariant_13_a_class_that_changes_after_apply_is_not_silently_unplanned() -> None:
    """Parametrizations and FSDP2 give a module a class of its own; the plan holds on, or somebody says so."""
    model = Stack(FunctionBlock(lambda block, hidden: (hidden @ block.linear.weight).tanh().exp()))
    with apply(model, "full", regions=["blocks.0"], memory={"verify": "always"}) as applied:
        block = model.blocks[0]
        block.__class__ = type("Renewed", (type(block),), {})
        model(features(4, 8)).sum().backward()
        assert applied.stats.num_replayed_ops > 0


def test_invariant_13_a_class_made_before_the_plan_is_not_silently_unplanned(qwen3: nn.Module) -> None:
    """FSDP2 makes one class for all models of a process, and Hugging Face gives it the `forward` of that time."""
    sharded = type("Sharded", (Qwen3DecoderLayer,), {})
    original = vars(sharded)["forward"]
    with apply(qwen3, "full") as applied:
        qwen3.model.layers[0].__class__ = sharded
        model_step(qwen3)
        assert all(region.num_replayed_ops > 0 for region in applied.stats.regions)
    assert vars(sharded)["forward"] is original


def test_invariant_13_a_plan_on_such_a_class_outlives_that_on_another_model(qwen3: nn.Module) -> None:
    sharded = type("Sharded", (Qwen3DecoderLayer,), {})
    with apply(qwen3, "full") as applied:
        with apply(tiny_qwen3(), "full"):
            qwen3.model.layers[0].__class__ = sharded
        model_step(qwen3)
        assert all(region.num_replayed_ops > 0 for region in applied.stats.regions)
    other = tiny_qwen3()
    first, second = apply(tiny_qwen3(), "full"), apply(other, "full")
    first.remove()
    other.model.layers[0].__class__ = sharded
    model_step(other)
    assert all(region.num_replayed_ops > 0 for region in second.stats.regions)
    second.remove()


def test_invariant_11_hugging_face_checkpointing_in_a_class_made_under_a_plan(qwen3: nn.Module) -> None:
    with apply(qwen3, "full"):
        sharded = type("Sharded", (Qwen3DecoderLayer,), {})
    for layer in qwen3.model.layers:
        layer.__class__ = sharded
    switch_checkpointing(qwen3, True, use_reentrant=False)
    calls: list[str] = []
    qwen3.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    model_step(qwen3)
    assert calls == ["mlp", "mlp"]


def test_invariant_11_a_wrapped_model_is_planned_through_the_wrapper() -> None:
    wrapped = nn.ModuleDict({"inner": tiny_qwen3()})
    with apply(wrapped, "full") as applied:
        language_loss(token_batch())(wrapped["inner"]).backward()
    assert [region.name for region in applied.stats.regions] == ["inner.model.layers.0", "inner.model.layers.1"]
    assert applied.stats.num_replayed_ops > 0


def test_invariant_11_parametrized_weights_inside_a_region() -> None:
    def build() -> nn.Module:
        block = FunctionBlock(lambda block, hidden: block.linear(hidden).tanh().exp())
        nn.utils.parametrizations.weight_norm(block.linear)
        return Stack(block)

    def run(model: nn.Module, number: int) -> dict[str, Tensor]:
        model(features(4, 8, seed=number)).square().mean().backward()
        return gradients_of(model)

    for policy in ("none", "full", "selective"):
        assert_same_outcome(build(), policy, run, regions=["blocks.0"])


def test_the_example_class_is_what_the_tests_think_it_is() -> None:
    assert isinstance(tiny_qwen3(), Qwen3ForCausalLM)
    planned, applied = planned_copy(tiny_qwen3(), "full")
    assert all(type(layer) is Qwen3DecoderLayer for layer in planned.model.layers)
    applied.remove()
