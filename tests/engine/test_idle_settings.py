"""Settings of the sections that do nothing: what a run says of them, and that strict matching refuses them.

`tests/cli/test_check_idle.py` holds `actmem check` to the same words."""

from __future__ import annotations

from typing import Any

import pytest
from planned_runs import language_loss, planned_copy, tiny_qwen3, token_batch
from torch import nn

from actmem.errors import PlanError
from actmem.runtime import NoEffectWarning, apply

FULL = {"mode": "full", "full_recompute_layer": [0]}
SELECT = {"mode": "select", "select_module": {"mlp": [0]}}


def recompute(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"recompute": {**base, **more}}


IDLE = [
    (recompute(FULL, exclude_op=["nothing"]), "recompute.exclude_op 'nothing' in layers 0 matches no op"),
    (recompute(FULL, exclude_op=["transpose"]), "'transpose' in layers 0 keeps nothing: what it matches is a view"),
    (recompute(FULL, exclude_op={"mlp": [1]}), "'mlp' in layers 1 keeps nothing: .*is not recomputed anyway"),
    (recompute(SELECT, exclude_op=["attention"]), "'attention' in layers 0 keeps nothing: .*is not recomputed anyway"),
    (recompute(FULL, exclude_op=["input"]), "'input' in layers 0 keeps nothing: what it matches is the layer's input"),
    (
        {"recompute": {"mode": "select", "select_module": {"input": [0], "mlp": [0]}}},
        "recompute.select_module 'input' in layers 0 frees 0 bytes: what it matches is the layer's input",
    ),
    (
        {"recompute": {"mode": "select", "select_module": {r"mlp\.down_proj": [0], "self_attn": [0]}}},
        r"recompute.select_module 'mlp\\.down_proj' in layers 0 frees 0 bytes: .*is a view.*is not saved",
    ),
    (
        recompute(SELECT, exclude_op={"mlp": [0]}),
        "recompute.select_module 'mlp' in layers 0 frees 0 bytes: what it matches is decided by a later rule",
    ),
]


@pytest.mark.parametrize(("sections", "words"), IDLE, ids=[case[1] for case in IDLE])
def test_invariant_13_an_idle_setting_is_told_as_it_was_written_and_why(
    qwen3: nn.Module, sections: dict[str, Any], words: str
) -> None:
    planned, applied = planned_copy(qwen3, sections)
    with applied, pytest.warns(NoEffectWarning, match=words) as caught:
        language_loss(token_batch())(planned).backward()
    assert "(?i)" not in str(caught[0].message)
    planned, applied = planned_copy(qwen3, sections, strict_matching=True)
    with applied, pytest.raises(PlanError, match=words):
        language_loss(token_batch())(planned).backward()


@pytest.mark.parametrize(
    "sections",
    [
        recompute(FULL, exclude_op=["mm"]),
        recompute(FULL, exclude_op=["mm", "MM"]),
        recompute(FULL, exclude_op=["mm", "m"]),
        recompute(FULL, exclude_op={"mlp": [0, 1]}),
        recompute(SELECT, exclude_op=["silu"]),
        recompute(SELECT, full_recompute_layer=[0]),
        recompute(SELECT, select_module={"mlp": [0], r"mlp\.act_fn": [0]}),
        recompute(SELECT, select_module={r"mlp\.act_fn": [0], "mlp": [0]}),
    ],
    ids=str,
)
def test_what_keeps_anything_is_not_told_of(qwen3: nn.Module, sections: dict[str, Any]) -> None:
    planned, applied = planned_copy(qwen3, sections, strict_matching=True)
    with applied:
        language_loss(token_batch())(planned).backward()


def test_what_strict_matching_refuses_it_refuses_each_time() -> None:
    model = tiny_qwen3()
    sections = {"recompute": {"mode": "select", "select_module": {"mlp": [0], "zz": [0]}}}
    with apply(model, sections, memory={"strict_matching": True}):
        for _ in range(3):
            with pytest.raises(PlanError, match="'zz'"):
                language_loss(token_batch(1))(model)
    language_loss(token_batch(1))(model).backward()
