"""A trace without memory is the trace of the real thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from actmem.config.schema import ModelConfig
from actmem.errors import ActmemError, ApplyError, PlanError
from actmem.graph import Graph
from actmem.measuring.floor import unplanned_fates
from actmem.models.building import build_model
from actmem.models.shapes import build_shapes
from actmem.planning import POLICIES, resolve
from actmem.planning.plan import RuleSet
from actmem.runtime.intercept import is_planned
from actmem.tracing import trace

SHAPE: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CPU = torch.device("cpu")
DENSE = SHAPE | {"model_type": "qwen3"}
MOE = SHAPE | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def trace_real(config: ModelConfig) -> Graph:
    tokens = torch.randint(128, (2, 8), generator=torch.Generator().manual_seed(0))
    return trace(build_model(config, seed=0).base_model, {"input_ids": tokens, "use_cache": False})


def trace_shapes(config: ModelConfig, shape: tuple[int, int] = (2, 8), kernels_on: torch.device | None = CPU) -> Graph:
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "use_cache": False}
    return trace(build_shapes(config).base_model, batch, kernels_on=kernels_on)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("fields", "experts"),
    [(DENSE, "grouped_mm"), (MOE, "grouped_mm"), (MOE, "batched_mm")],
    ids=["dense", "moe", "bmm"],
)
def test_shapes_alone_give_the_graph_of_real_tensors(
    fields: dict[str, object], experts: str, attention: str, dtype: str
) -> None:
    config = ModelConfig(config=fields, dtype=dtype, attn_implementation=attention, experts_implementation=experts)
    shapes, real = trace_shapes(config), trace_real(config)
    assert shapes.layers == real.layers
    assert shapes.kinds == real.kinds


def test_autocast_is_that_of_the_caller() -> None:
    config = ModelConfig(config=DENSE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shapes, real = trace_shapes(config), trace_real(config)
    assert shapes.kinds == real.kinds != trace_shapes(config).kinds


def test_layers_of_one_kind_share_a_graph() -> None:
    graph = trace_real(ModelConfig(config=DENSE))
    assert graph.layers == {f"layers.{index}": "Qwen3DecoderLayer" for index in range(3)}
    assert graph.of_layer("layers.2") is graph.kinds["Qwen3DecoderLayer"]


def test_a_layer_without_experts_is_a_kind_of_its_own() -> None:
    graph = trace_shapes(ModelConfig(config=MOE | {"mlp_only_layers": [1]}))
    kinds = list(graph.layers.values())
    assert kinds == ["Qwen3MoeDecoderLayer", "Qwen3MoeDecoderLayer#1", "Qwen3MoeDecoderLayer"]
    assert any(op.name == "_grouped_mm" for op in graph.of_layer("layers.0").ops)
    assert not any(op.name == "_grouped_mm" for op in graph.of_layer("layers.1").ops)


@pytest.mark.parametrize(("preset", "num_layers"), [("qwen3-8b", 36), ("qwen3-30b-a3b", 48)])
def test_a_full_size_model_is_traced_without_its_memory(preset: str, num_layers: int) -> None:
    graph = trace_shapes(ModelConfig(name=preset, dtype="bfloat16"), (4, 4096), kernels_on=None)
    assert len(graph.layers) == num_layers and len(graph.kinds) == 1
    (layer,) = graph.kinds.values()
    held = unplanned_fates(layer).held_bytes
    hidden = 2 * 4 * 4096 * {"qwen3-8b": 4096, "qwen3-30b-a3b": 2048}[preset]
    assert 20 * hidden < held < 60 * hidden


def test_grouped_matmuls_are_counted_and_never_run_again_by_selective() -> None:
    layer = trace_shapes(ModelConfig(config=MOE)).of_layer("layers.0")
    flops = [op.flops for op in layer.ops if op.name == "_grouped_mm"]
    rows = 2 * 8 * 2  # sequences, tokens, experts a token
    assert flops == [2 * rows * 64 * 64, 2 * rows * 32 * 64]
    replayed = resolve(layer, RuleSet(POLICIES["selective"](layer)).action_of).replayed
    assert replayed and not any(layer.ops[index].compute_intensive for index in replayed)


def test_experts_run_one_by_one_need_numbers() -> None:
    config = ModelConfig(config=MOE, experts_implementation="eager")
    with pytest.raises(ApplyError, match="depends on its numbers"):
        trace_shapes(config)
    assert len(trace_real(config).layers) == 3


def test_the_model_is_left_as_it_was() -> None:
    model = build_shapes(ModelConfig(config=DENSE)).base_model
    before = dict(model.named_parameters())
    trace(model, {"input_ids": torch.empty(1, 8, dtype=torch.int64), "use_cache": False})
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert all(parameter.is_meta and parameter.grad is None for parameter in after.values())
    assert not any(map(is_planned, model.modules()))


def test_gradients_are_on_even_where_the_caller_has_them_off() -> None:
    with torch.no_grad():
        graph = trace_real(ModelConfig(config=DENSE))
    assert graph == trace_real(ModelConfig(config=DENSE))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ApplyError, match="no decoder layers"):
        trace(nn.Linear(2, 2), {"input": torch.ones(1, 2)})


def test_a_graph_goes_through_a_file(tmp_path: Path) -> None:
    graph = trace_shapes(ModelConfig(config=MOE | {"mlp_only_layers": [1]}))
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == graph


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"layers": {}'], ids=["empty", "no keys", "list", "cut short"])
def test_a_file_that_is_no_graph_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ActmemError, match="graph"):
        Graph.load(path)


def test_a_graph_of_another_version_is_told(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    data = trace_shapes(ModelConfig(config=DENSE)).to_dict()
    path.write_text(json.dumps(data | {"actmem_graph": 99}))
    with pytest.raises(PlanError, match="actmem_graph: 1"):
        Graph.load(path)
    path.write_text(json.dumps({name: value for name, value in data.items() if name != "kinds"}))
    with pytest.raises(PlanError, match="kinds"):
        Graph.load(path)


@pytest.mark.parametrize("fields", [DENSE, MOE], ids=["dense", "moe"])
def test_shapes_of_a_saved_directory(fields: dict[str, object], tmp_path: Path) -> None:
    model = build_model(ModelConfig(config=fields), seed=0)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shapes = build_shapes(ModelConfig(path=tmp_path))
    assert {name: each.shape for name, each in shapes.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }
    assert all(parameter.is_meta for parameter in shapes.parameters())
