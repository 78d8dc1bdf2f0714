"""The models that have a name: the published Qwen3 family, and two small ones that train on a laptop.

Each preset holds fields of the Hugging Face configuration class of its `model_type`, as in the `config.json` that was
published with the weights. Fields that no forward or backward pass reads are left at the class's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Fields = Mapping[str, object]

_COMMON: dict[str, object] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def _dense(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool, **fields: object) -> Fields:
    return _fields("qwen3", hidden, intermediate, layers, heads, 8, tie_word_embeddings=tied, **fields)


def _moe(hidden: int, intermediate: int, layers: int, heads: int, *, expert: int, **fields: object) -> Fields:
    routing = {
        "moe_intermediate_size": expert,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    }
    return _fields("qwen3_moe", hidden, intermediate, layers, heads, 4, **(routing | fields))


def _fields(
    model_type: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: object
) -> Fields:
    shape = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return MappingProxyType(_COMMON | shape | more)


# A large vocabulary or 128 experts would be most of a small model, so the tiny ones have few of either.
_TINY: dict[str, object] = {
    "vocab_size": 4096,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}

PRESETS: Mapping[str, Fields] = MappingProxyType(
    {
        "qwen3-0.6b": _dense(1024, 3072, 28, 16, tied=True),
        "qwen3-1.7b": _dense(2048, 6144, 28, 16, tied=True),
        "qwen3-4b": _dense(2560, 9728, 36, 32, tied=True),
        "qwen3-8b": _dense(4096, 12288, 36, 32, tied=False),
        "qwen3-14b": _dense(5120, 17408, 40, 40, tied=False),
        "qwen3-32b": _dense(5120, 25600, 64, 64, tied=False),
        "qwen3-30b-a3b": _moe(2048, 6144, 48, 32, expert=768),
        "qwen3-235b-a22b": _moe(4096, 12288, 94, 64, expert=1536),
        "qwen3-tiny": _fields("qwen3", 256, 768, 4, 8, 4, **_TINY),
        "qwen3-moe-tiny": _moe(256, 768, 4, 8, expert=256, **(_TINY | {"num_experts": 8, "num_experts_per_tok": 2})),
    }
)
"""Name of a preset -> its Hugging Face configuration fields, `model_type` among them. Read-only."""
