"""The paths that configurations are checked against are those that models have."""

from __future__ import annotations

import pytest
import torch

from actmem.config.known_paths import KNOWN_PATHS
from actmem.config.schema import ModelConfig
from actmem.models.shapes import build_shapes
from actmem.tracing import trace

VARIANTS = (
    {"name": "qwen3-tiny"},
    {"name": "qwen3-tiny", "attn_implementation": "eager"},
    {"name": "qwen3-moe-tiny"},
    {"name": "qwen3-moe-tiny", "experts_implementation": "batched_mm"},
)


def paths_of(variant: dict[str, str]) -> set[str]:
    model = build_shapes(ModelConfig.model_validate(variant))
    tokens = torch.empty((1, 16), dtype=torch.int64, device="meta")
    graph = trace(model, {"input_ids": tokens, "use_cache": False})
    return {op.path for kind in graph.kinds.values() for op in kind.ops}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant.values()))
def test_every_op_of_a_layer_is_known(variant: dict[str, str]) -> None:
    assert paths_of(variant) <= {*KNOWN_PATHS}


def test_every_known_module_exists() -> None:
    traced = {path.partition("#")[0].rpartition(".")[0] for variant in VARIANTS for path in paths_of(variant)}
    assert {path.rpartition(".")[0] for path in KNOWN_PATHS} == traced
