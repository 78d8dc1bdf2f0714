"""The scenarios of the users' documentation load as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from actmem.config.loading import parse_config
from actmem.config.rules import idle_settings
from actmem.config.schema import ParallelConfig, ScheduleName
from actmem.config.shown import shown
from actmem.planning import Action
from actmem.planning.sections import plan_of_sections

OFF = "recompute_comm:\n  enable: False\nswap:\n  enable: False\n"
SWAPS = """\
swap:
  enable: True
  default_prefetch: 1
  layer_swap:
    - layers: [%s]
"""
EXAMPLES = [
    (32, "recompute:\n  mode: select\n  select_module:\n    '.*mlp': [0-31]\n" + OFF),
    (32, "recompute:\n  mode: full\n  full_recompute_layer: [0-15]\n" + OFF),
    (32, "recompute:\n  mode: full\n  full_recompute_layer: [0-31]\n" + OFF),
    (
        32,
        "recompute:\n  mode: full\n  full_recompute_layer: [0-15]\n"
        '  exclude_op: ["AllGather", "ReduceScatter", "AllToAll"]\n' + OFF,
    ),
    (
        32,
        "recompute:\n  mode: full\n  full_recompute_layer: [0-15]\nrecompute_comm:\n  enable: False\n"
        + SWAPS % "16-30",
    ),
    (8, "recompute:\n  mode: select\n  select_module:\n    '.*attention': [0-3]\n    '.*mlp': [4-7]\n" + OFF),
    (
        8,
        "recompute_comm:\n  enable: True\n  select_module:\n    '.*\\.all_gather': [0-3]\n"
        "recompute:\n  mode: None\nswap:\n  enable: False\n",
    ),
    (
        8,
        SWAPS % "0-1" + "  op_swap:\n    - op_name: '.*mlp'\n      layers: [2-3]\n"
        "recompute:\n  mode: None\nrecompute_comm:\n  enable: False\n",
    ),
]


@pytest.mark.parametrize(("num_layers", "text"), EXAMPLES)
def test_the_scenario_loads_and_says_something(num_layers: int, text: str) -> None:
    head = f"model: {{name: qwen3-tiny, config: {{num_hidden_layers: {num_layers}}}}}\ndata: {{path: [a]}}\n"
    config = parse_config(head + text)
    plan = plan_of_sections(config)
    assert idle_settings(config) == ()
    assert {rule.action for rule in plan.rules} & {Action.RECOMPUTE, Action.SWAP}
    assert all(max(rule.layers or ()) < num_layers for rule in plan.rules)


@pytest.mark.parametrize("page", ["scaling.md", "scaling.zh-CN.md"])
def test_every_key_of_parallel_stands_on_its_page_with_its_default(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| `([\w.]+)` \|", text, re.MULTILINE))
    defaults = {name: field.default for name, field in ParallelConfig.model_fields.items()}
    assert rows == {name: value if isinstance(value, str) else shown(value) for name, value in defaults.items()}
    assert all(f"`{schedule}`" in text for schedule in get_args(ScheduleName))
