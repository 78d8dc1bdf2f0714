"""Models small enough to be measured in a moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from actmem.config.schema import ModelConfig
from actmem.models.building import build_model

SHAPE: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FIELDS: dict[str, dict[str, object]] = {
    "dense": SHAPE | {"model_type": "qwen3"},
    "moe": SHAPE | {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def make_model() -> Callable[[str], PreTrainedModel]:
    """A fresh model of a family, dense or moe."""
    return lambda family: build_model(ModelConfig(config=FIELDS[family]), seed=0)
