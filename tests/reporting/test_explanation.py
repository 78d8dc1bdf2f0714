"""Each op of a real layer has a fate, a reason, and bytes that add up."""

from __future__ import annotations

import pytest
import torch

from actmem.config.schema import ModelConfig
from actmem.graph import Graph
from actmem.models.shapes import build_shapes
from actmem.planning import POLICIES, Action, Plan, Rule, resolve
from actmem.planning.plan import INPUT_PATH, RuleSet
from actmem.reporting.explanation import Explanation, explain, explain_layers
from actmem.runtime.engine import PlanRules, PolicyRules
from actmem.tracing import trace


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A mixture of experts whose second layer has none."""
    config = ModelConfig(name="qwen3-moe-tiny", config={"mlp_only_layers": [1], "num_hidden_layers": 3})
    tokens = torch.empty(2, 16, dtype=torch.int64, device="meta")
    return trace(build_shapes(config).base_model, {"input_ids": tokens, "use_cache": False})


def under(graph: Graph, policy: str) -> Explanation:
    return explain_layers(graph, PolicyRules(policy, POLICIES[policy]), [0])[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_those_of_the_fates(graph: Graph, policy: str) -> None:
    layer = graph.of_layer("layers.0")
    fates = resolve(layer, RuleSet(POLICIES[policy](layer)).action_of)
    total = under(graph, policy).total
    assert (total.held_bytes, total.dropped_bytes) == (fates.held_bytes, fates.dropped_bytes)
    assert total.flops == sum(op.flops for op in layer.ops)


@pytest.mark.parametrize("policy", POLICIES)
def test_action_and_reason_agree(graph: Graph, policy: str) -> None:
    for row in under(graph, policy).rows:
        assert row.reason
        if row.action == "save":
            assert row.held_bytes and not row.dropped_bytes
        if row.action == "recompute":
            assert "recomputed" in row.reason or "view" in row.reason
        else:
            assert not row.dropped_bytes


def test_reasons_of_selective(graph: Graph) -> None:
    rows = {row.path: row for row in under(graph, "selective").rows}
    reasons = {path: (row.action, row.reason) for path, row in rows.items()}
    assert reasons[INPUT_PATH] == ("save", "input of the layer")
    assert reasons["self_attn.q_proj.mm"] == ("save", "saved by plan")
    assert reasons["self_attn.q_proj.t"] == ("", "view")
    assert reasons["self_attn.o_proj.mm"] == ("", "not needed")
    assert reasons["mlp.experts.act_fn.silu"] == ("recompute", "recomputed")
    assert reasons["mlp.experts.sort"] == ("save", "always saved: integer or bool")


def test_an_op_of_two_outputs_may_have_two_fates(graph: Graph) -> None:
    (topk,) = [row for row in under(graph, "full").rows if row.path == "mlp.gate.topk"]
    assert (topk.action, topk.reason) == ("recompute", "always saved: integer or bool, recomputed")
    assert topk.held_bytes == 2 * 16 * 2 * 8


def test_intensity_is_that_of_the_arithmetic(graph: Graph) -> None:
    rows = {row.path: row for row in under(graph, "none").rows}
    rows_, inner, columns = 32, 256, 256
    moved = 4 * (rows_ * inner + inner * columns + rows_ * columns)
    assert rows["self_attn.q_proj.mm"].intensity == 2 * rows_ * inner * columns / moved
    assert rows["mlp.experts.act_fn.silu"].intensity is None


def test_layers_are_grouped_by_kind(graph: Graph) -> None:
    groups = explain_layers(graph, PolicyRules("full", POLICIES["full"]), range(3))
    assert [(each.kind, each.layers) for each in groups] == [
        ("Qwen3MoeDecoderLayer", (0, 2)),
        ("Qwen3MoeDecoderLayer#1", (1,)),
    ]


def test_layers_of_one_kind_under_other_rules_are_told_apart(graph: Graph) -> None:
    plan = Plan("mine", (Rule(r"mlp\..*", Action.RECOMPUTE, layers=(2,)),))
    first, last = explain_layers(graph, PlanRules(plan), [0, 2])
    assert (first.layers, last.layers) == ((0,), (2,))
    assert first.total.dropped_bytes == 0 < last.total.dropped_bytes


def test_rules_that_match_nothing_are_told(graph: Graph) -> None:
    plan = Plan("mine", (Rule("mpl.*", Action.RECOMPUTE), Rule(r"mlp\..*", Action.RECOMPUTE)))
    assert explain_layers(graph, PlanRules(plan), [0])[0].idle == ("mpl.*",)


def test_rows_without_a_plan_hold_everything(graph: Graph) -> None:
    layer = graph.of_layer("layers.1")
    rows = explain(resolve(layer, lambda path: Action.SAVE))
    assert not any(row.action == "recompute" for row in rows)
