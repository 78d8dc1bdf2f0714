"""A Hugging Face model from a run's `model` section: by preset, by configuration fields, or from a local directory.

Nothing here reaches the network, unpickles a file or runs code that came with the weights.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from actmem.config.presets import PRESETS
from actmem.config.schema import ModelConfig
from actmem.errors import ModelError

_ARCHITECTURES: Mapping[str, type[Any]] = {"qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
# Read by the model or by the configuration class, yet no field of the class.
_UNDECLARED_FIELDS = {"head_dim", "rope_theta"}
_TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_model(config: ModelConfig, *, vocab_size: int | None = None, seed: int) -> PreTrainedModel:
    """The causal language model that `config` describes, on the CPU, in training mode.

    A preset or `config.config` gives a fresh model whose parameters depend on `seed` alone; the caller's random state
    is left as it was. `vocab_size` then replaces the preset's vocabulary. It is the least vocabulary allowed where the
    configuration names one itself and for a directory, whose weights are loaded as they are. Parameters have
    `config.dtype`. A mixture of experts trains with its router's auxiliary loss, at the configuration's
    `router_aux_loss_coef`. Raises `ModelError`.
    """
    model = _load(config, config.path) if config.path is not None else _initialise(config, vocab_size, seed)
    if vocab_size is not None and model.config.vocab_size < vocab_size:
        raise ModelError(
            f"the model's vocabulary of {model.config.vocab_size} is smaller than the tokenizer's {vocab_size}; "
            f"allowed: {vocab_size} or more; use the model's own tokenizer (data.tokenizer) or a larger vocab_size"
        )
    model.train()
    return model


def model_fields(config: ModelConfig) -> dict[str, object]:
    """The Hugging Face configuration fields that `config` names: its preset's, replaced by those of `config.config`.

    Raises `ModelError` for a `model_type` other than qwen3 and qwen3_moe, and unknown fields.
    """
    fields = dict(PRESETS[config.name]) if config.name is not None else {}
    fields |= config.config or {}
    model_type = fields.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise ModelError(
            f"model_type is {model_type!r}; allowed: {', '.join(_ARCHITECTURES)}; give model.name, model.path, "
            "or model.config with a model_type"
        )
    _check_field_names(fields, _ARCHITECTURES[str(model_type)])
    return _with_fractions(fields, _ARCHITECTURES[str(model_type)])


def _with_fractions(fields: Mapping[str, object], config_class: type[PreTrainedConfig]) -> dict[str, object]:
    """Whole numbers as fractions where the class has fractions: it refuses ``attention_dropout: 0``."""
    usual = vars(config_class())
    return {
        name: float(value) if type(value) is int and type(usual.get(name)) is float else value
        for name, value in fields.items()
    }


def _check_field_names(fields: Mapping[str, object], config_class: type[PreTrainedConfig]) -> None:
    known = set(vars(config_class())) | set(config_class.attribute_map) | _UNDECLARED_FIELDS | {"model_type"}
    known = {name for name in known if not name.startswith("_")}
    unknown = [f"{name!r}{_nearest(name, known)}" for name in fields if name not in known]
    if unknown:
        raise ModelError(
            f"{config_class.__name__} has no field {'; '.join(unknown)}; "
            f"allowed: the fields of transformers' {config_class.__name__}"
        )


def _nearest(name: str, known: set[str]) -> str:
    match = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _initialise(config: ModelConfig, vocab_size: int | None, seed: int) -> PreTrainedModel:
    fields = model_fields(config)
    if vocab_size is not None and "vocab_size" not in (config.config or {}):
        fields["vocab_size"] = vocab_size
        fields |= {name: None for name in _TOKEN_ID_FIELDS if _is_outside(fields.get(name), vocab_size)}
    try:
        hf_config = _ARCHITECTURES[str(fields.pop("model_type"))](**fields)
        _check_shape(hf_config)
        _set_behaviour(hf_config, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(hf_config, dtype=config.dtype)  # type: ignore[no-untyped-call]
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise ModelError(f"no model can be built from this configuration: {error}; mend model.config") from error
    assert isinstance(model, PreTrainedModel)
    return model


def _check_shape(hf_config: Any) -> None:
    """What would otherwise fail only in the first forward pass, as a mismatch of shapes that names no field."""
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary positions need an even one")
    if isinstance(hf_config, Qwen3MoeConfig) and hf_config.num_experts_per_tok > hf_config.num_experts:
        raise ValueError(f"num_experts_per_tok {hf_config.num_experts_per_tok} of num_experts {hf_config.num_experts}")


def _is_outside(token_id: object, vocab_size: int) -> bool:
    return isinstance(token_id, int) and token_id >= vocab_size


def _set_behaviour(hf_config: PreTrainedConfig, config: ModelConfig) -> None:
    """Training's settings, none of which touch the shape of a weight."""
    hf_config.use_cache = False
    hf_config._attn_implementation = config.attn_implementation
    if isinstance(hf_config, Qwen3MoeConfig):
        hf_config._experts_implementation = config.experts_implementation
        hf_config.output_router_logits = hf_config.router_aux_loss_coef > 0


def _load(config: ModelConfig, path: Path) -> PreTrainedModel:
    if config.name is not None or config.config is not None:
        raise ModelError("model.path stands beside model.name or model.config; a directory has its own; remove one")
    _check_directory(path)
    config_class = _ARCHITECTURES[_model_type(path)]
    try:
        hf_config = config_class.from_pretrained(path, local_files_only=True)
        _check_shape(hf_config)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ModelError(f"no model can be built from {path / 'config.json'}: {error}; mend that file") from error
    _set_behaviour(hf_config, config)
    model, report = _read_weights(path, hf_config, config.dtype)
    _check_loaded(report, path)
    return model


def _read_weights(path: Path, hf_config: PreTrainedConfig, dtype: str) -> tuple[PreTrainedModel, Mapping[str, object]]:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they come back in the report, which names them better
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights in {path} cannot be read: {error}; copy the directory again") from error
    model, report = loaded
    return model, report


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"model.path {path} is not a directory; give a local Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json; give a directory written by save_pretrained")
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{path} holds no *.safetensors; weights in other formats are not read, since loading them can run code; "
            "save the model again with safe_serialization=True"
        )


def _model_type(path: Path) -> str:
    try:
        model_type = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ModelError(f"{path / 'config.json'} is no model configuration: {error!r}; copy it again") from error
    if model_type not in _ARCHITECTURES:
        raise ModelError(
            f"{path} holds a {model_type!r} model; allowed: {', '.join(_ARCHITECTURES)}; "
            "other architectures train through actmem.apply(model, plan) in your own loop"
        )
    return str(model_type)


def _check_loaded(report: Mapping[str, object], path: Path) -> None:
    """Hugging Face fills missing weights with random numbers and goes on; for training that is a silent fault."""
    kinds = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "of another shape"}
    faults = [f"{label}: {_some(keys)}" for kind, label in kinds.items() if (keys := report.get(kind))]
    if faults:
        raise ModelError(
            f"the weights in {path} do not fit its config.json ({'; '.join(faults)}); "
            "mend the configuration or copy the directory again"
        )


def _some(keys: object, limit: int = 4) -> str:
    assert isinstance(keys, (set, list, tuple))
    names = sorted(key if isinstance(key, str) else f"{key[0]} {list(key[1])} for {list(key[2])}" for key in keys)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
