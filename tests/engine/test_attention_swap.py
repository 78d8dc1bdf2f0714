"""`activation_swap: attention`, as its users were promised it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from planned_runs import (
    Stack,
    assert_same_steps,
    assert_same_tensors,
    language_loss,
    tiny_qwen3,
    token_batch,
    training_step,
)
from torch import Tensor, nn

import actmem
from actmem.errors import ApplyError, ConfigError, PlatformError
from actmem.runtime.intercept import is_planned
from actmem.runtime.swap.storage import SwapOrder
from actmem.runtime.swap.swapper import Swapper

ATTENTION = {"activation_swap": "attention"}
SMALL = {"min_swap_bytes": 0, "verify": "always"}


class Unknown(nn.Module):
    """A model of layers, none of them verified."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])


@pytest.mark.parametrize("family", ["dense", "grouped_mm", "eager"])
def test_only_what_attention_makes_is_swapped_and_nothing_changes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped: set[str] = set()
    swap = Swapper.swap

    def spy(self: Swapper, tensor: Tensor, order: SwapOrder, *rest: Any, **settings: Any) -> Any:
        swapped.add(order.path)
        return swap(self, tensor, order, *rest, **settings)

    monkeypatch.setattr(Swapper, "swap", spy)
    model = tiny_qwen3(family)
    planned = copy.deepcopy(model)
    with actmem.apply(planned, ATTENTION, memory=SMALL) as applied:
        assert list(planned.state_dict()) == list(model.state_dict())
        for number in range(3):
            loss = language_loss(token_batch(number))
            assert_same_steps([training_step(planned, loss)], [training_step(model, loss)])
        assert applied.stats.swap.num_begun > 0
    assert {"self_attn.q_proj.mm", "self_attn.scaled_dot_product_attention"} <= swapped
    assert all(path.startswith("self_attn.") for path in swapped)
    assert_same_tensors(planned.state_dict(), model.state_dict(), "state ")


def test_asked_twice_it_changes_nothing() -> None:
    model = tiny_qwen3()
    first = actmem.apply(model, ATTENTION, memory=SMALL)
    assert actmem.apply(model, ATTENTION, memory=SMALL) is first
    with pytest.raises(ApplyError, match="under a plan already"):
        actmem.apply(model, ATTENTION, memory={"min_swap_bytes": 4096})
    with pytest.raises(ApplyError, match="under a plan already"):
        actmem.apply(model, "full")
    first.remove()
    assert not any(map(is_planned, model.modules()))
    second = actmem.apply(model, ATTENTION, memory=SMALL)
    assert second is not first
    second.remove()


def test_none_leaves_the_model_as_it_is() -> None:
    model = tiny_qwen3()
    with actmem.apply(model, {"activation_swap": "none"}) as applied:
        assert not applied.swaps


def refused(model: nn.Module, sections: Any = ATTENTION, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        actmem.apply(model, sections, **options)
    assert not any(map(is_planned, model.modules()))
    return str(caught.value)


def test_an_unverified_model_is_refused_unless_its_user_insists() -> None:
    layer = nn.Module()
    layer.self_attn = nn.Linear(4, 4)
    model = Unknown(layer)
    assert "Unknown; verified: Qwen3MoeForCausalLM, Qwen3ForCausalLM" in refused(model, regions=["layers.0"])
    allowed = ATTENTION | {"allow_unverified_model": True}
    with actmem.apply(model, allowed, regions=["layers.0"]) as applied:
        assert applied.swaps


def test_a_class_that_only_derives_from_a_verified_one_is_not_verified() -> None:
    model = tiny_qwen3()
    model.__class__ = type("MyQwen3", (type(model),), {})
    assert "MyQwen3" in refused(model)


def test_a_layer_without_attention_is_refused_even_then() -> None:
    model = Unknown(nn.Linear(4, 4))
    allowed = ATTENTION | {"allow_unverified_model": True}
    assert "layers.0 has no module self_attn (1 of 1 layers)" in refused(model, allowed, regions=["layers.0"])


def test_foreign_attention_in_a_verified_model_is_refused() -> None:
    model = tiny_qwen3()
    model.model.layers[1].self_attn = nn.MultiheadAttention(16, 2)
    message = refused(model)
    assert "needs Qwen3Attention in each layer, but model.layers.1 has a MultiheadAttention" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_refused() -> None:
    model = tiny_qwen3()
    model.model.layers[0].compile(backend="eager")
    assert "torch.compile" in refused(model)


def test_hugging_face_checkpointing_on_the_same_model_is_refused() -> None:
    model = tiny_qwen3()
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_enable")()
    assert "Hugging Face gradient checkpointing is on" in refused(model)


def test_another_platform_is_not_implemented() -> None:
    model = tiny_qwen3()
    with pytest.raises(NotImplementedError, match="mindspore") as caught:
        actmem.apply(model, ATTENTION | {"platform": "mindspore"})
    assert isinstance(caught.value, PlatformError)
    assert not any(map(is_planned, model.modules()))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"activation_swap": "attn"}, "attention"),
        ({"activation_swap": True}, "activation_swap"),
        ({"activation_swaps": "attention"}, "did you mean 'activation_swap'"),
        ({"swap": {"enable": True, "layer_swap": [{"layers": [0, 1]}]}}, "reach layer 2 of 2"),
        ({"swap": {"enable": True, "default_prefetch": 2, "layer_swap": [{"layers": [0]}]}}, "default_prefetch"),
    ],
)
def test_wrong_sections_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        actmem.apply(tiny_qwen3(), sections)


def test_recomputed_and_swapped_layers_in_one_model() -> None:
    sections = {
        "recompute": {"mode": "full", "full_recompute_layer": [1]},
        "swap": {"enable": True, "layer_swap": [{"layers": [0]}]},
    }
    model = tiny_qwen3()
    planned = copy.deepcopy(model)
    with actmem.apply(planned, sections, memory=SMALL) as applied:
        for number in range(3):
            loss = language_loss(token_batch(number))
            assert_same_steps([training_step(planned, loss)], [training_step(model, loss)])
        swapped, recomputed = applied.stats.regions
        assert swapped.swapped_bytes > 0 and swapped.dropped_bytes == 0
        assert recomputed.swapped_bytes == 0 and recomputed.dropped_bytes > 0


def test_a_scratch_directory_that_is_not_there_is_told_before_anything(tmp_path: Path) -> None:
    model = tiny_qwen3()
    assert "memory.disk_path" in refused(model, memory={"disk_path": str(tmp_path / "nowhere")})


def test_stacks_of_other_modules_swap_under_a_policy() -> None:
    with actmem.apply(Stack(nn.Linear(4, 4)), "layer-swap", regions=["blocks.0"]) as applied:
        assert applied.swaps
