"""Sizes of a model, and what else a layout asks of it, before it is built.

They are those of the preset, of `model.config` or of the config.json in `model.path`; where a model type alone is
given, those of its configuration class. What none of them says is not known.
"""

from __future__ import annotations

import json
from pathlib import Path

from actmem.config.presets import PRESETS, Fields
from actmem.config.schema import ModelConfig, RunConfig

_DENSE, _MOE = "qwen3", "qwen3_moe"
_DEFAULTS: dict[str, Fields] = {  # of Hugging Face's configuration classes
    _DENSE: {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
    _MOE: {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "num_experts": 128,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.001,
    },
}
_OTHER_NAMES = {"num_local_experts": "num_experts"}  # as Transformers writes them
_MAX_FILE_BYTES = 2**20


def num_layers(model: ModelConfig) -> int | None:
    """Layers of the model; ``None`` where nothing says how many."""
    return size(model, "num_hidden_layers")


def size(model: ModelConfig, field: str) -> int | None:
    """The size that Hugging Face's configurations call `field`; ``None`` where it is not known, or is no size."""
    return _as_size(_fields(model).get(field))


def is_dense(model: ModelConfig) -> bool:
    """Whether the model is known to have no experts."""
    return _fields(model).get("model_type") == _DENSE


def is_moe(model: ModelConfig) -> bool:
    """Whether the model is known to be a mixture of experts."""
    return _fields(model).get("model_type") == _MOE


def is_tied(model: ModelConfig) -> bool:
    """Whether embedding and head are known to be one weight."""
    return _fields(model).get("tie_word_embeddings") is True


def router_loss_share(model: ModelConfig) -> float:
    """The share of the router's auxiliary loss in the loss; 0 where the model has none, or is not known to."""
    share = _fields(model).get("router_aux_loss_coef") if is_moe(model) else None
    return float(share) if isinstance(share, int | float) and 0 < share < 2**63 else 0.0


def sizes_cut_by_tensor_parallel(model: ModelConfig) -> dict[str, int]:
    """The sizes that tensor parallel cuts into equal parts, as far as they are known."""
    fields = _fields(model)
    names = ["num_attention_heads", "num_key_value_heads", "hidden_size"]
    if is_dense(model) or (is_moe(model) and _has_dense_layers(fields)):
        names.append("intermediate_size")
    if is_moe(model):
        names.append("num_experts")
    sizes = {name: _as_size(fields.get(name)) for name in names}
    return {name: size for name, size in sizes.items() if size is not None}


def vocab_size(config: RunConfig) -> int | None:
    """The vocabulary that the model will have, with a tokenizer trained to its full size; ``None`` where only the
    tokenizer in `data.tokenizer` knows."""
    model, data = config.model, config.data
    if model.path is not None or "vocab_size" in (model.config or {}):
        return size(model, "vocab_size")
    return data.vocab_size if data.tokenizer is None else None


def _fields(model: ModelConfig) -> dict[str, object]:
    fields = dict(PRESETS[model.name]) if model.name is not None else _published(model.path) if model.path else {}
    fields |= model.config or {}
    fields = {_OTHER_NAMES.get(name, name): value for name, value in fields.items()}
    model_type = fields.get("model_type")
    return {**(_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}), **fields}


def _as_size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63 else None


def _has_dense_layers(fields: Fields) -> bool:
    """Whether some layers of a mixture of experts have an MLP in place of experts."""
    return bool(fields.get("mlp_only_layers")) or fields.get("decoder_sparse_step") != 1


def _published(directory: Path) -> dict[str, object]:
    try:
        with (directory / "config.json").open("rb") as file:
            fields = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):  # whoever builds the model says what is wrong with the file
        return {}
    return fields if isinstance(fields, dict) else {}
