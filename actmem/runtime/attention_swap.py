"""What `activation_swap: attention` asks of a model: the refusals that its users were promised.

It is meant for models whose attention has been tried under it. Everything else about it is an ordinary plan: what the
ops below `self_attn` make, and the backward pass reads, is swapped; norms, residuals and the MLP or experts are not.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from actmem.errors import ApplyError

VERIFIED = {"Qwen3MoeForCausalLM": "Qwen3MoeAttention", "Qwen3ForCausalLM": "Qwen3Attention"}
"""Model classes of Transformers, and the class of their layers' `self_attn`."""


def check_attention_swap(model: nn.Module, regions: Mapping[str, nn.Module], *, allow_unverified: bool) -> None:
    """Raise `ApplyError`, a `ValueError`, for a model that has not been verified or a layer without its attention."""
    expected = _expected_attention(model)
    if expected is None and not allow_unverified:
        raise ApplyError(
            f"activation_swap: attention has not been verified for {type(model).__name__}; verified: "
            f"{', '.join(VERIFIED)} of Transformers; set allow_unverified_model: true to take it all the same, or use "
            "the policy attention-swap"
        )
    wrong = {name: _attention_class(layer) for name, layer in regions.items()}
    wrong = {name: found for name, found in wrong.items() if found is None or found != (expected or found)}
    if wrong:
        name, found = next(iter(wrong.items()))
        what = "has no module self_attn" if found is None else f"has a {found} for self_attn"
        raise ApplyError(
            f"activation_swap: attention needs {expected or 'an attention'} in each layer, but {name} {what} "
            f"({len(wrong)} of {len(regions)} layers); name other regions, or write a plan with rules for this model"
        )


def _expected_attention(model: nn.Module) -> str | None:
    """The attention class of the verified model that `model` is or wraps (as PEFT, DDP or FSDP do)."""
    for module in model.modules():
        name = type(module).__name__.removeprefix("FSDP")
        if name in VERIFIED and any(base.__module__.startswith("transformers.") for base in type(module).__mro__[:2]):
            return VERIFIED[name]
    return None


def _attention_class(layer: nn.Module) -> str | None:
    attention = getattr(layer, "self_attn", None)
    return type(attention).__name__.removeprefix("FSDP") if isinstance(attention, nn.Module) else None
