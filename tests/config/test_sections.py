"""The sections `activation_swap`, `recompute`, `recompute_comm` and `swap`: configurations right and wrong, and what is
said of each. The model has four layers, unless a case says otherwise."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3MoeConfig

from actmem.config.layers import from_ranges
from actmem.config.loading import parse_config
from actmem.config.patterns import TIME_LIMIT, SlowPatternError, matches, pattern_problem
from actmem.config.rules import idle_settings
from actmem.config.schema import ModelConfig, RunConfig
from actmem.config.settings import LAYER_FIELDS, settings_in
from actmem.config.sizes import num_layers
from actmem.errors import ConfigError, Fault

HEAD = "model: {name: qwen3-tiny}\ndata: {path: [a.txt]}\n"
FULL = "recompute: {mode: full, full_recompute_layer: %s}"
SELECT = "recompute: {mode: select, select_module: %s}"
COMM = "recompute_comm: {enable: true, select_module: %s}"
SWAP = "swap: {enable: true, layer_swap: [{layers: %s}]}"
OPS = "swap: {enable: true, op_swap: [{op_name: '.*mlp', layers: %s}]}"


def faults_of(text: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(HEAD + text, "run.yaml")
    return caught.value.faults


def layers_in(config: RunConfig) -> list[tuple[int, ...]]:
    return [setting.layers for field in LAYER_FIELDS for setting in settings_in(config, field)]


# Text -> the layers of all settings, in the order of the fields.
SOUND: list[tuple[str, list[tuple[int, ...]]]] = [
    ("", []),
    ("activation_swap: none", []),
    ("activation_swap: attention", []),
    ("activation_swap: attention\nallow_unverified_model: true", []),
    ("platform: torch", []),
    ("platform: mindspore", []),
    ("recompute: {}", []),
    ("recompute: {mode: None}", []),
    ("recompute: {mode: null}", []),
    ("recompute: {mode: ~}", []),
    ("recompute: {mode: 'None'}", []),
    ("recompute:\n  mode:", []),
    ("recompute: {full_recompute_layer: null, select_module: null, exclude_op: null}", []),
    ("recompute_comm: {}", []),
    ("recompute_comm: {enable: false}", []),
    ("recompute_comm: {enable: False, select_module: null}", []),
    ("swap: {}", []),
    ("swap: {enable: FALSE}", []),
    ("swap: {enable: false, default_prefetch: 1, layer_swap: null, op_swap: null}", []),
    ("recompute: {mode: None}\nrecompute_comm: {enable: False}\nswap: {enable: False}\npolicy: full", []),
    (FULL % "[0]", [(0,)]),
    (FULL % "[3]", [(3,)]),
    (FULL % "[0-3]", [(0, 1, 2, 3)]),
    (FULL % "[0-1, 3]", [(0, 1, 3)]),
    (FULL % "[0, 1, 2-3]", [(0, 1, 2, 3)]),
    (FULL % "['0', '2']", [(0, 2)]),
    (FULL % "[2-2]", [(2,)]),
    (FULL % "['0 - 3']", [(0, 1, 2, 3)]),
    (FULL % "[' 1 ']", [(1,)]),
    (FULL % "[00]", [(0,)]),
    (FULL % "2", [(2,)]),
    (FULL % "'2'", [(2,)]),
    (FULL % "0-3", [(0, 1, 2, 3)]),
    (FULL % "'0-1, 3'", [(0, 1, 3)]),
    (FULL % "'0-1,3'", [(0, 1, 3)]),
    (FULL % "' 0 , 1 '", [(0, 1)]),
    (FULL % "[0-1], exclude_op: [AllGather, ReduceScatter, AllToAll]", [(0, 1)]),
    (FULL % "[0-1], exclude_op: []", [(0, 1)]),
    (FULL % "[0-1], exclude_op: {'.*mlp': [0]}", [(0, 1), (0,)]),
    (FULL % "[0-1], exclude_op: {'.*mlp': '0-1'}", [(0, 1), (0, 1)]),
    (SELECT % "{'.*mlp': [0-3]}", [(0, 1, 2, 3)]),
    (SELECT % "{'.*mlp': 0-3}", [(0, 1, 2, 3)]),
    (SELECT % "{'.*mlp': 3}", [(3,)]),
    (SELECT % "{'.*attention': [0-1], '.*mlp': [2-3]}", [(0, 1), (2, 3)]),
    (SELECT % "{mlp: [0], '(?i)MLP|x': [1], 'a(b|c)?': [2], '[^.]+': [3]}", [(0,), (1,), (2,), (3,)]),
    (SELECT % "{'.*mlp': [0-3]}, full_recompute_layer: [0-1]", [(0, 1), (0, 1, 2, 3)]),
    (COMM % r"{'.*\.all_gather': [0-3]}", [(0, 1, 2, 3)]),
    (SWAP % "[0-2]", [(0, 1, 2)]),
    (SWAP % "0-2", [(0, 1, 2)]),
    ("swap: {enable: true, default_prefetch: 3, layer_swap: [{layers: [0]}]}", [(0,)]),
    ("swap: {enable: true, default_prefetch: 2, layer_swap: [{layers: [0-1]}]}", [(0, 1)]),
    ("swap: {enable: true, layer_swap: [{layers: [0]}, {layers: [2]}]}", [(0,), (2,)]),
    (OPS % "[1-2]", [(1, 2)]),
    (OPS % "1", [(1,)]),
    ("swap: {enable: true, layer_swap: [{layers: [0-1]}], op_swap: [{op_name: mlp, layers: [2]}]}", [(0, 1), (2,)]),
    ("swap: {enable: true, layer_swap: [], op_swap: [{op_name: mlp, layers: [2]}]}", [(2,)]),
    (FULL % "[0-1]" + "\n" + SWAP % "[2]", [(0, 1), (2,)]),
    (SELECT % "{'.*self_attn': [0-3]}" + "\n" + OPS % "[0-2]", [(0, 1, 2, 3), (0, 1, 2)]),
    (SELECT % "{'.*mlp': [0-1]}" + "\n" + OPS % "[2]", [(0, 1), (2,)]),
    (SELECT % r"{'mlp\.gate_proj': [0]}" + "\n" + OPS.replace(".*mlp", r"mlp\.up_proj") % "[0]", [(0,), (0,)]),
    (SELECT % "{'.*mlp': [0-3]}" + "\nactivation_swap: attention", [(0, 1, 2, 3)]),
    (SELECT % "{sdpa|mlp: [0]}" + "\n" + OPS.replace(".*mlp", r".*\.sdpa") % "[0]", [(0,), (0,)]),
    (SWAP % "[0]" + "\nactivation_swap: attention", [(0,)]),
    (COMM % r"{'mlp\.all_gather': [0-3]}" + "\nactivation_swap: attention", [(0, 1, 2, 3)]),
    (COMM % r"{'.*self_attn': [0]}" + "\nactivation_swap: attention", [(0,)]),  # a module, so of no effect
    ("recompute: {mode: None, full_recompute_layer: [0-2]}\n" + SWAP % "[0-2]", [(0, 1, 2), (0, 1, 2)]),
    ("recompute: {mode: full, full_recompute_layer: [0], select_module: {x: [1]}}\n" + OPS % "[1]", [(0,), (1,), (1,)]),
    (FULL % "[0-2]" + "\nswap: {enable: false, layer_swap: [{layers: [0-2]}]}", [(0, 1, 2), (0, 1, 2)]),
    (
        "recompute: &r {mode: full, full_recompute_layer: &l [0-1]}\nswap: {layer_swap: [{layers: *l}]}",
        [(0, 1), (0, 1)],
    ),
]


@pytest.mark.parametrize(("text", "layers"), SOUND, ids=lambda value: value if isinstance(value, str) else "")
def test_a_sound_configuration_is_read(text: str, layers: list[tuple[int, ...]]) -> None:
    config = parse_config(HEAD + text)
    assert layers_in(config) == layers
    assert parse_config(config.model_dump(exclude_none=True)) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


R, S, C = "recompute", "swap", "recompute_comm"
FRL, SEL, EXC = f"{R}.full_recompute_layer", f"{R}.select_module", f"{R}.exclude_op"
NOT_A_LAYER = "is not a layer or a range of layers"

# Text -> path of the only fault, and words of its problem.
WRONG: list[tuple[str, str, str]] = [
    # switches
    ("activation_swap: null", "activation_swap", "is empty (null)"),
    ("activation_swap: true", "activation_swap", "true is a truth value"),
    ("activation_swap: Attention", "activation_swap", "'Attention' is not among the allowed names"),
    ("activation_swap: [attention]", "activation_swap", "is a list"),
    ("platform: tensorflow", "platform", "'tensorflow' is not among"),
    ("platform: null", "platform", "is empty (null)"),
    ("allow_unverified_model: 1", "allow_unverified_model", "1 is a whole number"),
    ("allow_unverified_model: yes", "allow_unverified_model", "'yes' is text"),
    # recompute.mode
    ("recompute: {mode: Full}", f"{R}.mode", "'Full' is not among the allowed names"),
    ("recompute: {mode: none}", f"{R}.mode", "'none' is not among the allowed names"),
    ("recompute: {mode: false}", f"{R}.mode", "false is a truth value"),
    ("recompute: {mode: 1}", f"{R}.mode", "1 is a whole number"),
    ("recompute: {mode: full}", f"{R}.mode", f"full needs {FRL}"),
    ("recompute: {mode: full, full_recompute_layer: null}", f"{R}.mode", f"full needs {FRL}"),
    ("recompute: {mode: full, select_module: {'.*mlp': [0]}}", f"{R}.mode", f"full needs {FRL}"),
    ("recompute: {mode: select}", f"{R}.mode", f"select needs {SEL}"),
    ("recompute: {mode: select, select_module: {}}", f"{R}.mode", f"select needs {SEL}"),
    ("recompute: {mode: select, full_recompute_layer: [0]}", f"{R}.mode", f"select needs {SEL}"),
    ("recompute: null", R, "is empty (null)"),
    ("recompute: full", R, "'full' is text"),
    ("recompute: [full]", R, "is a list"),
    # layers, as entries
    (FULL % "[4]", f"{FRL}[0]", "4 is beyond the last layer, 3"),
    (FULL % "[0-4]", f"{FRL}[0]", "'0-4' is beyond the last layer, 3"),
    (FULL % "[0, 99999]", f"{FRL}[1]", "99999 is beyond layer 9999"),
    (FULL % "['0-99999999999999']", f"{FRL}[0]", "is beyond layer 9999"),
    (FULL % "['0-99999999999999999999999999']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "[-1]", f"{FRL}[0]", "-1 is negative"),
    (FULL % "['-1']", f"{FRL}[0]", "'-1' is negative"),
    (FULL % "[-2-3]", f"{FRL}[0]", "'-2-3' is negative"),
    (FULL % "['1--3']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "[true]", f"{FRL}[0]", f"true {NOT_A_LAYER}"),
    (FULL % "[1.0]", f"{FRL}[0]", f"1.0 {NOT_A_LAYER}"),
    (FULL % "[1e0]", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "[null]", f"{FRL}[0]", f"null {NOT_A_LAYER}"),
    (FULL % "['']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "[all]", f"{FRL}[0]", f"'all' {NOT_A_LAYER}"),
    (FULL % "[0-]", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "['0..3']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "['0-1-2']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "['0, 1']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "['0x1']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "['٣']", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "[[0, 1]]", f"{FRL}[0]", f"[0, 1] {NOT_A_LAYER}"),
    (FULL % "[{a: 1}]", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "[3-1]", f"{FRL}[0]", "it runs backwards; write '1-3'"),
    (FULL % "[1, 0]", f"{FRL}[1]", "0 is out of order: it does not come after 1"),
    (FULL % "[1, 1]", f"{FRL}[1]", "1 is out of order"),
    (FULL % "[0-2, 2]", f"{FRL}[1]", "2 is out of order: it does not come after '0-2'"),
    (FULL % "[0-2, 1-3]", f"{FRL}[1]", "'1-3' is out of order"),
    (FULL % "[2-3, 0-1]", f"{FRL}[1]", "'0-1' is out of order"),
    # layers, as a whole
    (FULL % "[]", FRL, "names no layer"),
    ("recompute: {full_recompute_layer: []}", FRL, "names no layer"),
    ("recompute: {full_recompute_layer: ''}", FRL, "names no layer"),
    (FULL % "'3, 1'", f"{FRL}[1]", "'1' is out of order"),
    (FULL % "'0-1,'", f"{FRL}[1]", NOT_A_LAYER),
    (FULL % "'[0-3]'", f"{FRL}[0]", NOT_A_LAYER),
    (FULL % "-1", f"{FRL}[0]", "-1 is negative"),
    (FULL % "true", FRL, "true is a truth value"),
    (FULL % "1.5", FRL, "1.5 is a number"),
    (FULL % "{a: 3}", FRL, "is a section"),
    # they are checked whatever the mode
    ("recompute: {mode: None, full_recompute_layer: [9]}", f"{FRL}[0]", "beyond the last layer"),
    ("recompute: {mode: None, select_module: {mlp: [9]}}", f"{SEL}.mlp[0]", "beyond the last layer"),
    (FULL % "[0], select_module: {mlp: [2-1]}", f"{SEL}.mlp[0]", "it runs backwards"),
    ("recompute_comm: {enable: false, select_module: {mlp: [9]}}", f"{C}.select_module.mlp[0]", "beyond the last"),
    ("swap: {enable: false, layer_swap: [{layers: [9]}]}", f"{S}.layer_swap[0].layers[0]", "beyond the last layer"),
    ("swap: {enable: false, layer_swap: [{layers: [3]}]}", f"{S}.layer_swap[0].layers[0]", "reach layer 4 of 4"),
    ("swap: {enable: false, default_prefetch: 4}", f"{S}.default_prefetch", "4 is out of range"),
    # select_module
    (SELECT % "['.*mlp']", SEL, "is a list"),
    (SELECT % "'.*mlp'", SEL, "is text"),
    (SELECT % "{'.*mlp': null}", f"{SEL}['.*mlp']", "is empty (null)"),
    (SELECT % "{'.*mlp': []}", f"{SEL}['.*mlp']", "names no layer"),
    (SELECT % "{'.*mlp': true}", f"{SEL}['.*mlp']", "true is a truth value"),
    (SELECT % "{'.*mlp': {layers: [0]}}", f"{SEL}['.*mlp']", "is a section"),
    (SELECT % "{'.*mlp': [4]}", f"{SEL}['.*mlp'][0]", "4 is beyond the last layer, 3"),
    (SELECT % "{'.*mlp': [1, 0]}", f"{SEL}['.*mlp'][1]", "0 is out of order"),
    (SELECT % "{'': [0]}", f"{SEL}['']", "is empty, and matches no path"),
    (SELECT % "{3: [0], mlp: [0]}", SEL, "has the key '3'"),
    (SELECT % "{mlp: [0], mlp: [1]}", f"{SEL}.mlp", "is given twice"),
    (SELECT % "{'(': [0]}", f"{SEL}['(']", "is not a valid regex: missing )"),
    (SELECT % "{'*mlp': [0]}", f"{SEL}['*mlp']", "nothing to repeat"),
    (SELECT % "{'[z-a]': [0]}", f"{SEL}['[z-a]']", "bad character range"),
    (SELECT % "{'mlp(?i)': [0]}", f"{SEL}['mlp(?i)']", "global flags not at the start"),
    (SELECT % r"{'a\': [0]}", f"{SEL}['a\\']", "bad escape (end of pattern)"),
    (SELECT % "{'(a|a)*$': [0]}", f"{SEL}['(a|a)*$']", "blows up"),
    (SELECT % "{'(([a-z_.]|[a-z_.])+)+[0-9]': [0]}", f"{SEL}['(([a-z_.]|[a-z_.])+)+[0-9]']", "blows up"),
    (
        SELECT % "{'((a{999}){999}){999}': [0]}",
        f"{SEL}['((a{{999}}){{999}}){{999}}']".replace("{{", "{").replace("}}", "}"),
        "repeats too much",
    ),
    (SELECT % "{'a{99999999999}': [0]}", f"{SEL}['a{{99999999999}}']", "repeats too much"),
    # exclude_op
    (FULL % "[0], exclude_op: AllGather", EXC, "'AllGather' is text"),
    (FULL % "[0], exclude_op: [1]", f"{EXC}[0]", "1 is a whole number"),
    (FULL % "[0], exclude_op: [null]", f"{EXC}[0]", "is empty (null)"),
    (FULL % "[0], exclude_op: ['']", f"{EXC}[0]", "'' is empty"),
    (FULL % "[0], exclude_op: true", EXC, "true is a truth value"),
    (FULL % "[0], exclude_op: {mm: [9]}", f"{EXC}.mm[0]", "9 is beyond the last layer"),
    (FULL % "[0], exclude_op: {mm: null}", f"{EXC}.mm", "is empty (null)"),
    (FULL % "[0], exclude_op: {'(': [0]}", f"{EXC}['(']", "is not a valid regex"),
    # recompute_comm
    ("recompute_comm: {enable: true}", f"{C}.enable", f"true needs {C}.select_module"),
    ("recompute_comm: {enable: true, select_module: {}}", f"{C}.enable", "true needs"),
    ("recompute_comm: {enable: 'True'}", f"{C}.enable", "'True' is text"),
    ("recompute_comm: {enable: null}", f"{C}.enable", "is empty (null)"),
    ("recompute_comm: null", C, "is empty (null)"),
    (COMM % "[all_gather]", f"{C}.select_module", "is a list"),
    (COMM % "{all_gather: [0-4]}", f"{C}.select_module.all_gather[0]", "beyond the last layer"),
    (COMM % "{'(': [0]}", f"{C}.select_module['(']", "is not a valid regex"),
    # swap
    ("swap: null", S, "is empty (null)"),
    ("swap: {enable: true}", f"{S}.enable", f"true needs {S}.layer_swap or {S}.op_swap"),
    ("swap: {enable: true, layer_swap: [], op_swap: []}", f"{S}.enable", "true needs"),
    ("swap: {enable: 1, layer_swap: [{layers: [0]}]}", f"{S}.enable", "1 is a whole number"),
    ("swap: {default_prefetch: 0}", f"{S}.default_prefetch", "0 is out of range"),
    ("swap: {default_prefetch: -1}", f"{S}.default_prefetch", "-1 is out of range"),
    ("swap: {default_prefetch: true}", f"{S}.default_prefetch", "true is a truth value"),
    ("swap: {default_prefetch: 1.0}", f"{S}.default_prefetch", "1.0 is a number"),
    ("swap: {default_prefetch: null}", f"{S}.default_prefetch", "is empty (null)"),
    ("swap: {enable: true, default_prefetch: 4, layer_swap: [{layers: [0]}]}", f"{S}.default_prefetch", "4 is out"),
    (SWAP % "[3]", f"{S}.layer_swap[0].layers[0]", "3 and default_prefetch 1 reach layer 4 of 4"),
    (SWAP % "[0-3]", f"{S}.layer_swap[0].layers[0]", "'0-3' and default_prefetch 1 reach layer 4 of 4"),
    ("swap: {enable: true, default_prefetch: 3, layer_swap: [{layers: [1]}]}", f"{S}.layer_swap[0].layers[0]", "reach"),
    (OPS % "[3]", f"{S}.op_swap[0].layers[0]", "reach layer 4 of 4"),
    (SWAP % "[4]", f"{S}.layer_swap[0].layers[0]", "4 is beyond the last layer, 3"),
    (SWAP % "[]", f"{S}.layer_swap[0].layers", "names no layer"),
    (SWAP % "[1_0]", f"{S}.layer_swap[0].layers[0]", "'1_0' is not a layer"),
    (SWAP % "null", f"{S}.layer_swap[0].layers", "is empty (null)"),
    ("swap: {layer_swap: {layers: [0]}}", f"{S}.layer_swap", "is a section"),
    ("swap: {layer_swap: [[0]]}", f"{S}.layer_swap[0]", "is a list"),
    ("swap: {layer_swap: [{}]}", f"{S}.layer_swap[0].layers", "is missing"),
    ("swap: {op_swap: [{layers: [0]}]}", f"{S}.op_swap[0].op_name", "is missing"),
    ("swap: {op_swap: [{op_name: mlp}]}", f"{S}.op_swap[0].layers", "is missing"),
    ("swap: {op_swap: [{op_name: 3, layers: [0]}]}", f"{S}.op_swap[0].op_name", "3 is a whole number"),
    ("swap: {op_swap: [{op_name: null, layers: [0]}]}", f"{S}.op_swap[0].op_name", "is empty (null)"),
    ("swap: {op_swap: [{op_name: '', layers: [0]}]}", f"{S}.op_swap[0].op_name", "is empty, and matches no path"),
    ("swap: {op_swap: [{op_name: '(', layers: [0]}]}", f"{S}.op_swap[0].op_name", "is not a valid regex"),
    ("swap: {op_swap: mlp}", f"{S}.op_swap", "is text"),
    # two ways at once
    ("policy: full\n" + FULL % "[0]", f"{R}.mode", "is given beside policy: full"),
    ("policy: none\nactivation_swap: attention", "activation_swap", "is given beside policy: none"),
    ("policy: full\n" + COMM % "{mm: [0]}", f"{C}.enable", "is given beside policy: full"),
    ("policy: mlp\n" + SWAP % "[0]", f"{S}.enable", "is given beside policy: mlp"),
    # recomputed and swapped
    (FULL % "[0-1]" + "\n" + SWAP % "[1-2]", f"{S}.layer_swap[0].layers", f"is also recomputed, by {FRL}: layer 1"),
    (FULL % "[0-2]" + "\n" + OPS % "[1-2]", f"{S}.op_swap[0].layers", f"by {FRL}: layers 1-2"),
    (SELECT % "{'.*mlp': [0-2]}" + "\n" + SWAP % "[2]", f"{S}.layer_swap[0].layers", f"by {SEL} '.*mlp': layer 2"),
    (SELECT % "{'.*mlp': [0]}" + "\n" + OPS % "[0]", f"{S}.op_swap[0].layers", "the same pattern in layer 0"),
    (SELECT % r"{'mlp\.up_proj': [0]}" + "\n" + OPS % "[0]", f"{S}.op_swap[0].layers", "mlp.up_proj in layer 0"),
    (
        SELECT % "{'.*': [0]}" + "\n" + OPS.replace(".*mlp", r"mlp\.up_proj") % "[0]",
        f"{S}.op_swap[0].layers",
        ": layer 0",
    ),
    (SELECT % "{'.*mlp': [0]}" + "\n" + OPS.replace(".*mlp", ".*") % "[0]", f"{S}.op_swap[0].layers", ": layer 0"),
    (
        SELECT % "{'.*proj': [0]}" + "\n" + OPS.replace(".*mlp", r"mlp\.up_proj\.mm#1") % "[0]",
        f"{S}.op_swap[0].layers",
        "proj.mm#1 in",
    ),
    (
        SELECT % "{'.*sdpa': [0]}" + "\n" + OPS.replace(".*mlp", "scaled_dot_product_attention") % "[0]",
        f"{S}.op_swap[0].layers",
        "attention in",
    ),
    (
        SELECT % r"{'self_attn\.q_proj': [0]}" + "\nactivation_swap: attention",
        "activation_swap",
        "self_attn.q_proj in layer 0",
    ),
    (COMM % r"{'mlp\.all_reduce': [0]}" + "\n" + OPS % "[0]", f"{S}.op_swap[0].layers", "mlp.all_reduce in layer 0"),
    (SELECT % "{'.*': [0]}" + "\n" + OPS % "[0]", f"{S}.op_swap[0].layers", "is also recomputed"),
    (FULL % "[0]" + "\nactivation_swap: attention", "activation_swap", f"is also recomputed, by {FRL}: layer 0"),
    (COMM % r"{'.*\.all_gather': [0]}" + "\n" + SWAP % "[0]", f"{S}.layer_swap[0].layers", "is also recomputed"),
    # unknown keys
    ("recompute: {mod: full}", f"{R}.mod", "is not a key of recompute"),
    ("recompute_com: {enable: true}", "recompute_com", "is not a key of the top level"),
    ("swap: {layer_swaps: []}", f"{S}.layer_swaps", "is not a key of swap"),
    (
        "swap: {op_swap: [{op: mlp, op_name: mlp, layers: [0]}]}",
        f"{S}.op_swap[0].op",
        "is not a key of swap.op_swap[0]",
    ),
    ("recompute: {mode: None, mode: None}", f"{R}.mode", "is given twice"),
]


@pytest.mark.parametrize(("text", "path", "words"), WRONG, ids=[case[0] for case in WRONG])
def test_a_wrong_configuration_has_the_one_fault(text: str, path: str, words: str) -> None:
    (fault,) = faults_of(text)
    assert fault.path == path
    assert words in fault.problem
    assert fault.line is not None and fault.column is not None


def test_there_are_enough_cases() -> None:
    assert len(SOUND) + len(WRONG) >= 200


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("activation_swap: attn", "attention"),
        ("recompute: {mode: ful}", "full"),
        ("recompute: {mode: none}", "None"),
        ("recompute: {full_recompute_layers: [0]}", "full_recompute_layer"),
        ("recompute: {exclude_ops: [x]}", "exclude_op"),
        ("recompute_comm: {enabled: true}", "enable"),
        ("swap: {prefetch: 2}", "default_prefetch"),
        ("swap: {op_swap: [{opname: x, layers: [0], op_name: x}]}", "op_name"),
        ("layer_swap: []", "swap.layer_swap"),
        ("platform: Torch", "torch"),
    ],
)
def test_the_nearest_name_is_offered(text: str, nearest: str) -> None:
    (fault,) = faults_of(text)
    assert fault.nearest == nearest


def test_all_faults_come_at_once_with_their_lines() -> None:
    text = """\
policy: full
recompute:
  mode: selct
  full_recompute_layer: [3-1, true, 0 - 2, 9]
  select_module: {'(': [0], '.*mlp': [true, 2, 1-2], x: null}
  exclude_op: [1]
swap:
  enable: true
  default_prefetch: 4
  layer_swp: 3
  op_swap: [{op_name: '.*', layers: [3-9]}]
"""
    assert [(fault.line, fault.path) for fault in faults_of(text)] == [
        (5, "recompute.mode"),
        (6, "recompute.full_recompute_layer[0]"),
        (6, "recompute.full_recompute_layer[1]"),
        (6, "recompute.full_recompute_layer[3]"),
        (7, "recompute.select_module['(']"),
        (7, "recompute.select_module['.*mlp'][0]"),
        (7, "recompute.select_module['.*mlp'][2]"),
        (7, "recompute.select_module.x"),
        (8, "recompute.exclude_op[0]"),
        (10, "swap.enable"),
        (11, "swap.default_prefetch"),
        (12, "swap.layer_swp"),
        (13, "swap.op_swap[0].layers[0]"),
    ]


def test_a_plan_file_is_a_way_of_its_own(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.touch()
    found = faults_of(f"plan: {plan}\npolicy: full\n{FULL % '[0]'}\n{SWAP % '[1]'}\n")
    assert [fault.path for fault in found] == ["plan", "recompute.mode", "swap.enable"]
    assert "is given beside policy: full" in found[1].problem
    (alone,) = faults_of(f"plan: {plan}\n{SWAP % '[1]'}\n")
    assert (alone.path, alone.problem) == (
        "swap.enable",
        f"is given beside plan: {plan}; both say what becomes of activations",
    )


IDLE: list[tuple[str, list[str]]] = [
    ("recompute: {mode: None, exclude_op: [AllGather]}", [EXC]),
    ("recompute: {exclude_op: [AllGather], full_recompute_layer: [0]}", [FRL, EXC]),
    ("recompute: {mode: null, select_module: {mlp: [0]}}", [SEL]),
    (FULL % "[0], select_module: {mlp: [1]}", [SEL]),
    ("recompute_comm: {enable: false, select_module: {mm: [0]}}", [f"{C}.select_module"]),
    ("swap: {default_prefetch: 2}", [f"{S}.default_prefetch"]),
    ("swap: {enable: false, layer_swap: [{layers: [0]}]}", [f"{S}.layer_swap"]),
    ("swap: {op_swap: [{op_name: mlp, layers: [0]}]}", [f"{S}.op_swap"]),
    ("allow_unverified_model: true", ["allow_unverified_model"]),
    ("activation_swap: attention\nallow_unverified_model: true", []),
    ("recompute: {mode: None}\nrecompute_comm: {enable: False}\nswap: {enable: False}", []),
    ("recompute: {mode: None, exclude_op: [], select_module: {}}", []),
    (SELECT % "{mlp: [0]}, full_recompute_layer: [1], exclude_op: [mm]", []),
    ("swap: {enable: true, default_prefetch: 2, layer_swap: [{layers: [0]}]}", []),
]


@pytest.mark.parametrize(("text", "paths"), IDLE, ids=[case[0] for case in IDLE])
def test_settings_without_effect_are_warned_of(text: str, paths: list[str]) -> None:
    assert [warning.path for warning in idle_settings(parse_config(HEAD + text))] == paths


def section(**fields: Any) -> RunConfig:
    return parse_config({"model": {"name": "qwen3-tiny"}, "data": {"path": ["a"]}, "recompute": fields})


@pytest.mark.parametrize("layers", [[0, "2-3"], (0, "2-3"), "0, 2-3", ("0", "2 - 3")])
def test_layers_from_python(layers: object) -> None:
    config = section(mode="full", full_recompute_layer=layers)
    assert from_ranges(config.recompute.full_recompute_layer or ()) == (0, 2, 3)


def test_layers_from_python_that_are_none() -> None:
    for layers in ({0, 2}, range(3), b"0", {"0": 1}, 10**5000, [10**5000], [object()]):
        with pytest.raises(ConfigError) as caught:
            section(mode="full", full_recompute_layer=layers)
        assert len(str(caught.value)) < 500


def test_none_is_the_mode_none_in_python_too() -> None:
    assert section(mode=None).recompute.mode == "None"


def test_exclude_op_may_be_a_tuple() -> None:
    assert section(exclude_op=("AllGather",)).recompute.exclude_op == ("AllGather",)


def test_the_number_of_layers(tmp_path: Path) -> None:
    assert num_layers(ModelConfig(name="qwen3-8b")) == 36
    assert num_layers(ModelConfig(name="qwen3-8b", config={"num_hidden_layers": 2})) == 2
    for model_type, config_class in (("qwen3", Qwen3Config), ("qwen3_moe", Qwen3MoeConfig)):
        assert num_layers(ModelConfig(config={"model_type": model_type})) == config_class().num_hidden_layers
    assert num_layers(ModelConfig(config={"model_type": "other"})) is None
    assert num_layers(ModelConfig(config={"num_hidden_layers": True})) is None
    assert num_layers(ModelConfig(path=tmp_path)) is None
    for text, expected in [('{"num_hidden_layers": 7}', 7), ("[]", None), ("{", None), ("[" * 10000, None)]:
        (tmp_path / "config.json").write_text(text)
        assert num_layers(ModelConfig(path=tmp_path)) == expected


def test_layers_are_counted_where_the_model_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    for model in (
        f"path: {tmp_path}",
        "name: qwen3-tiny, config: {num_hidden_layers: 2}",
        "config: {num_hidden_layers: 2}",
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(f"model: {{{model}}}\ndata: {{path: [a]}}\n{FULL % '[0-2]'}")
        (fault,) = caught.value.faults
        assert fault.allowed == "layers from 0 to 1"
    assert parse_config(f"model: {{config: {{}}}}\ndata: {{path: [a]}}\n{FULL % '[0-200]'}")


def test_a_model_of_one_layer_cannot_swap() -> None:
    head = "model: {name: qwen3-tiny, config: {num_hidden_layers: 1}}\ndata: {path: [a]}\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(head + SWAP % "[0]")
    assert "swap needs a model of two layers" in str(caught.value)
    assert parse_config(head + "swap: {enable: false}")


@pytest.mark.parametrize(
    "pattern", ["(a|a)*$", "(x|x|x)+[yz]", "(([a-z_.]|[a-z_.])+)+[0-9]", "(.|[a-z])*(.|[a-z])*(.|[a-z])*[XZ]"]
)
def test_a_slow_pattern_is_given_up(pattern: str) -> None:
    started = time.perf_counter()
    assert "blows up" in (pattern_problem(pattern) or "")
    assert time.perf_counter() - started < 10 * TIME_LIMIT


def test_a_pattern_that_is_slow_on_one_path_alone_is_given_up_there() -> None:
    pattern = "(q|q)*[XZ]|(é|é)*[XZ]"
    with pytest.raises(SlowPatternError, match="nest fewer repeats"):
        matches(pattern, "é" * 60)


@pytest.mark.parametrize(
    "pattern", ["(" * 60 + ")" * 60, "a" * 1001, "(?:a{100}){100}{100}", "a{,99999999}b{,99999999}"]
)
def test_a_pattern_too_large_to_compile_is_never_compiled(pattern: str) -> None:
    assert "more than" in (problem := pattern_problem(pattern) or "") or "repeats too much" in problem


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("[[:alpha:]]*", "has '[:alpha:]', a name for characters in some dialects alone"),
        ("[^[:^digit:]]+", "has '[:^digit:]'"),
        ("[[a-z]]+", "may be read in two ways: possible nested set"),
        ("[a-z&&[^m]]*", "may be read in two ways"),
        ("[a--b]+", "may be read in two ways: possible set difference"),
        ("[mlp||x]+", "may be read in two ways: possible set union"),
        ("[mlp~~x]+", "may be read in two ways: possible set symmetric difference"),
        ("(?:mlp){e<=1}", "has the brace '{e<=1}', which is no repeat"),
        ("(?:mpl){s}", "has the brace '{s}'"),
        ("(?:mlp){1<=e<=2}", "has the brace"),
        ("mlp{}", "has the brace '{}'"),
        ("mlp{", "has the brace '{'"),
    ],
)
def test_what_two_dialects_read_differently_is_refused(pattern: str, words: str) -> None:
    (fault,) = faults_of(SELECT % f"{{'{pattern}': [0]}}")
    assert words in fault.problem and fault.line is not None


@pytest.mark.parametrize(
    "pattern", [r"mlp\{e\}?", "[{e<=1}]?mlp", "ml{1}p", "m{1,}lp", r"[\[a-z]+", "[a-z-]+", "[]m]lp"]
)
def test_what_both_read_alike_is_allowed(pattern: str) -> None:
    assert pattern_problem(pattern) is None


DIALECT = [
    "mlp",
    ".*",
    "[",
    "]",
    "[^",
    "{e}",
    "{1}",
    "{s<=1}",
    "(?:",
    ")",
    "--",
    "&&",
    "[:alpha:]",
    "a-z",
    "|",
    "^",
    "\\",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(DIALECT), min_size=1, max_size=6).map("".join))
@example("[[:alpha:]]+")
@example("(?:mpl){e<=2}")
def test_a_sound_pattern_matches_what_python_says_it_does(pattern: str) -> None:
    if pattern_problem(pattern) is None:
        for path in ("mlp", "mlp.act_fn", "self_attn", "alpha:", "m", "add"):
            assert matches(pattern, path) == bool(re.fullmatch(pattern, path))
