"""Whether a published figure can be true on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from actmem.hardware.profile import Hardware


def dense_step_flops(fields: Mapping[str, int], num_sequences: int, length: int) -> int:
    """FLOPs of a forward and backward pass of a dense Qwen3 over `num_sequences` sequences of `length` tokens.

    `fields` are those of its Hugging Face configuration. Counted is the least that must be done: products with every
    matrix, the head's included, twice as much again in the backward pass; and causal attention, half of the square,
    whose backward pass takes two and a half times its forward (five products for two, as flash attention does). What
    is recomputed comes on top.
    """
    query = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    hidden = fields["hidden_size"]
    layer = 2 * hidden * (query + keys) + 3 * hidden * fields["intermediate_size"]
    weights = fields["num_hidden_layers"] * layer + hidden * fields["vocab_size"]
    products = 3 * 2 * weights * num_sequences * length
    attention = fields["num_hidden_layers"] * num_sequences * 2 * length**2 * query
    return products + attention + attention * 5 // 2


def implied_flops_per_second(flops: float, seconds: float) -> float:
    """The rate that a claim of `flops` done in `seconds` implies. Raises `ValueError` unless both are above zero."""
    return _implied(flops, seconds)


def flops_claim_problem(flops: float, seconds: float, hardware: Hardware) -> str | None:
    """Why `flops` cannot be done in `seconds`; ``None`` if the device's peak allows it."""
    implied, peak = implied_flops_per_second(flops, seconds), hardware.matmul_flops_per_second.peak
    if implied <= peak:
        return None
    return f"implies {implied / 1e12:,.0f} TFLOP/s on a {peak / 1e12:,.0f} TFLOP/s card"


def link_claim_problem(
    num_bytes: float, seconds: float, hardware: Hardware, direction: Literal["out", "in"]
) -> str | None:
    """Why `num_bytes` cannot cross the link to the host's memory in `seconds`; ``None`` if its peak allows it."""
    if hardware.link is None:
        return f"{hardware.name} has no link"
    rate = hardware.link.out_bytes_per_second if direction == "out" else hardware.link.in_bytes_per_second
    implied = _implied(num_bytes, seconds)
    if implied <= rate.peak:
        return None
    return f"implies {implied / 1e9:,.0f} GB/s on a {rate.peak / 1e9:,.0f} GB/s link"


def _implied(amount: float, seconds: float) -> float:
    if not (amount > 0 and seconds > 0):
        raise ValueError(f"{amount:g} in {seconds:g} s imply no rate; allowed: both above zero")
    return amount / seconds
