"""The paths that configurations are checked against are those that models have."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from actmem.config.known_paths import KNOWN_PATHS
from actmem.config.op_names import is_communication, split_path
from actmem.config.schema import ModelConfig
from actmem.models.shapes import build_shapes
from actmem.tracing import trace

VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "qwen3-tiny"},
    {"name": "qwen3-tiny", "config": {"attention_bias": True}},
    {"name": "qwen3-tiny", "dtype": "bfloat16"},
    {"name": "qwen3-tiny", "config": {"attention_bias": True}, "autocast": True},
    {"name": "qwen3-tiny", "attn_implementation": "eager"},
    {"name": "qwen3-moe-tiny"},
    {"name": "qwen3-moe-tiny", "dtype": "bfloat16"},
    {"name": "qwen3-moe-tiny", "autocast": True},
    {"name": "qwen3-moe-tiny", "experts_implementation": "batched_mm"},
)


@cache
def paths_of(number: int) -> frozenset[str]:
    fields = dict(VARIANTS[number])
    autocast = bool(fields.pop("autocast", False))
    model = build_shapes(ModelConfig.model_validate(fields))
    tokens = torch.empty((1, 16), dtype=torch.int64, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        graph = trace(model, {"input_ids": tokens, "use_cache": False})
    return frozenset(op.path for kind in graph.kinds.values() for op in kind.ops)


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=[str([*variant.values()]) for variant in VARIANTS])
def test_every_op_of_a_layer_is_known(number: int) -> None:
    assert paths_of(number) <= {*KNOWN_PATHS}


def test_every_known_module_exists() -> None:
    traced = {path.partition("#")[0].rpartition(".")[0] for number in range(len(VARIANTS)) for path in paths_of(number)}
    assert {path.rpartition(".")[0] for path in KNOWN_PATHS} == traced


ON_TWO_RANKS = """
import warnings

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from actmem.config.schema import ModelConfig
from actmem.models.building import build_model
from actmem.parallel import shard_tensors
from actmem.parallel.mesh import MeshSizes, build_mesh
from actmem.runtime import apply

warnings.simplefilter("ignore")
distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
for name, sizes, sequence_parallel in [
    ("qwen3-tiny", MeshSizes(tp_size=2), False),
    ("qwen3-tiny", MeshSizes(tp_size=2), True),
    ("qwen3-moe-tiny", MeshSizes(tp_size=2), True),
    ("qwen3-moe-tiny", MeshSizes(dp_shard_size=2, ep_size=2), False),
]:
    model = build_model(ModelConfig.model_validate({"name": name, "config": small}), seed=0)
    shard_tensors(model, build_mesh(sizes, "cpu"), sequence_parallel=sequence_parallel, loss_parallel=False)
    with apply(model, "none", memory={"verify": "off"}) as applied:
        model.base_model(input_ids=torch.zeros((1, 16), dtype=torch.int64), use_cache=False)
        print(*(op.path for graph in applied.graphs.values() for op in graph.ops))
"""


def test_collectives_are_known_where_layers_have_them_on_many_ranks() -> None:
    done = subprocess.run([sys.executable, "-c", ON_TWO_RANKS], capture_output=True, text=True, check=True)
    paths = {path.partition("#")[0] for path in done.stdout.split() if is_communication(split_path(path)[1])}
    assert {"self_attn.all_gather_into_tensor", "mlp.all_reduce", "reduce_scatter_tensor"} <= paths
    assert {"mlp.all_to_all_single", "mlp.experts.all_to_all_single", "wait_tensor"} <= paths
    assert paths <= {*KNOWN_PATHS}
