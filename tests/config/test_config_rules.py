"""Rules between fields, beside whatever else is wrong; and settings without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from actmem.config.loading import parse_config, parse_sections, parse_sections_and_memory
from actmem.config.rules import idle_settings
from actmem.errors import ConfigError

DATA = "data: {path: [a]}\n"
MODEL = "model: {name: qwen3-tiny}\n"


def found(text: str) -> list[tuple[str, int | None, str]]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    return [(fault.path, fault.line, fault.problem) for fault in caught.value.faults]


def test_policy_and_plan_exclude_each_other(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.touch()
    text = f"{MODEL}{DATA}policy: full\nplan: {plan}\n"
    assert found(text) == [("plan", 4, "is given beside policy: full; both say what to save")]
    assert parse_config(text.replace("policy: full", "policy: null")).plan == plan


def test_what_to_type_beside_a_policy_of_the_file() -> None:
    text = f"{MODEL}{DATA}policy: full\n"
    with pytest.raises(ConfigError, match="policy=null on the command line"):
        parse_config(text, overrides=["memory_budget=1GiB"])
    assert parse_config(text, overrides=["memory_budget=1GiB", "policy=null"]).policy is None


def test_some_model_must_be_named() -> None:
    assert found("model: {dtype: float32}\n" + DATA) == [("model", 1, "names no model")]


def test_name_and_path_exclude_each_other_and_so_do_path_and_config(tmp_path: Path) -> None:
    text = f"model:\n  name: qwen3-tiny\n  path: {tmp_path}\n  config: {{}}\n{DATA}"
    assert found(text) == [
        ("model.path", 3, "is given beside model.name: qwen3-tiny; each names a model"),
        ("model.config", 4, "is given beside model.path, whose directory has a config of its own"),
    ]
    assert parse_config(f"model: {{name: qwen3-tiny, config: {{num_hidden_layers: 2}}}}\n{DATA}")


def test_the_warm_up_fits_into_the_steps() -> None:
    text = MODEL + DATA + "train:\n  steps: 5\n  warmup_steps: 6\n"
    assert found(text) == [("train.warmup_steps", 5, "6 warm-up steps are more than the 5 steps of train.steps")]
    assert parse_config(text.replace("6", "5"))
    with pytest.raises(ConfigError, match=r"add train\.warmup_steps=0 to the command"):
        parse_config(text, overrides=["train.steps=3"])
    assert parse_config(text, overrides=["train.steps=3", "train.warmup_steps=0"])
    assert found(MODEL + DATA + "train: {warmup_steps: 101}")[0][0] == "train.warmup_steps"


def test_paths_must_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = f"model: {{path: {tmp_path}/nope}}\ndata: {{path: [a], tokenizer: {tmp_path}/file}}\nplan: {tmp_path}\n"
    assert found(text) == [
        ("model.path", 1, f"'{tmp_path}/nope' does not exist"),
        ("data.tokenizer", 2, f"'{tmp_path}/file' is not a directory"),
        ("plan", 3, f"'{tmp_path}' is a directory"),
    ]


def test_a_path_too_long_for_the_disk_does_not_exist() -> None:
    assert found(f"{MODEL}{DATA}plan: {'x' * 5000}\n")[0][2].endswith("does not exist")


def test_paths_are_seen_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    text = f"model: {{path: model}}\n{DATA}"
    assert found(text)[0][0] == "model.path"
    monkeypatch.chdir(tmp_path)
    assert parse_config(text).model.path == Path("model")


def test_rules_run_beside_faults_in_other_fields() -> None:
    text = (
        "model: {name: x, path: nope}\ndata: 3\ntrain: {lr: x, steps: 5, warmup_steps: 6}\npolicy: full\nplan: nope\n"
    )
    assert [path for path, _, _ in found(text)] == [
        "model.name",
        "model.path",
        "data",
        "train.lr",
        "train.warmup_steps",
        "plan",
        "plan",
    ]


def test_a_rule_waits_until_its_own_fields_are_sound() -> None:
    assert [path for path, _, _ in found(MODEL + DATA + "train: {steps: x, warmup_steps: 600}")] == ["train.steps"]
    assert [path for path, _, _ in found(DATA + "model: 3\n")] == ["model"]
    assert [path for path, _, _ in found(DATA + "model: {name: !odd x, dtype: x}\n")] == ["model.name", "model.dtype"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("train: {steps: 5}", "train.warmup_steps"),
        ("train: {eval_batches: 3}", "train.eval_batches"),
        ("train: {keep_checkpoints: 3}", "train.keep_checkpoints"),
    ],
)
def test_settings_without_effect_are_warned_of(text: str, path: str) -> None:
    (warning,) = idle_settings(parse_config(f"{MODEL}{DATA}{text}"))
    assert warning.path == path


def test_a_vocabulary_size_beside_a_tokenizer_has_no_effect(tmp_path: Path) -> None:
    config = parse_config(f"{MODEL}data: {{path: [a], tokenizer: {tmp_path}, vocab_size: 300}}")
    assert [warning.path for warning in idle_settings(config)] == ["data.vocab_size"]


def test_settings_with_effect_are_not_warned_of() -> None:
    train = "train: {eval_batches: 3, eval_every: 5, keep_checkpoints: 1, checkpoint_every: 5, warmup_steps: 100}"
    assert idle_settings(parse_config(f"{MODEL}{DATA}{train}")) == ()


OVERLAP = """\
recompute: {mode: select, select_module: {'.*mlp': [0]}}
swap:
  enable: true
  op_swap:
    - {op_name: '.*mlp', layers: [0, x]}
    - {op_name: 3, layers: [0]}
    - {op_name: 'mlp\\.up_proj', layers: [0]}
    - {op_name: mlp, layers: [9], typo: 1}
  layer_swap: [{}, [0], {layers: [0]}, {layers: [3]}]
"""


def test_one_bad_entry_of_a_list_hides_no_other() -> None:
    assert [(path, line) for path, line, _ in found(MODEL + DATA + OVERLAP)] == [
        ("swap.op_swap[0].layers[1]", 7),
        ("swap.op_swap[1].op_name", 8),
        ("swap.op_swap[2].layers", 9),
        ("swap.op_swap[3].layers[0]", 10),
        ("swap.op_swap[3].typo", 10),
        ("swap.layer_swap[0].layers", 11),
        ("swap.layer_swap[1]", 11),
        ("swap.layer_swap[2].layers", 11),
        ("swap.layer_swap[3].layers[0]", 11),
    ]


@pytest.mark.parametrize(
    "fault",
    ["recompute_comm: {enable: 1}", "activation_swap: odd", "swap: {layer_swap: [3], odd: 1, default_prefetch: x}"],
)
def test_what_is_recomputed_and_swapped_is_told_beside_any_other_fault(fault: str) -> None:
    swap = "enable: true, op_swap: [{op_name: mlp, layers: [0]}]"
    sections = f"recompute: {{mode: full, full_recompute_layer: [0], exclude_op: 3}}\nswap: {{{swap}}}\n"
    text = sections.replace(swap, f"{swap}, {fault[7:-1]}") if fault.startswith("swap") else f"{sections}{fault}\n"
    problems = {path: problem for path, _, problem in found(MODEL + DATA + text)}
    assert problems["swap.op_swap[0].layers"] == "is also recomputed, by recompute.full_recompute_layer: layer 0"
    assert problems["recompute.exclude_op"] == "3 is a whole number"
    assert len(problems) > 2


@pytest.mark.parametrize(
    ("way", "name"),
    [("policy: ful", "policy: 'ful'"), ("plan: []", "plan: []"), ("memory_budget: 3XB", "memory_budget: '3XB'"),
     ("policy: !odd x", "policy")],
)  # fmt: skip
def test_a_way_that_is_misspelt_is_a_way_all_the_same(way: str, name: str) -> None:
    text = f"{MODEL}{DATA}{way}\nactivation_swap: attention\n"
    problems = {path: problem for path, _, problem in found(text)}
    assert problems["activation_swap"] == f"is given beside {name}; both say what becomes of activations"
    assert way.partition(":")[0] in problems


def test_what_is_given_twice_hides_nothing() -> None:
    text = f"""\
{MODEL}{DATA}train: {{steps: 3}}
swap: {{enable: true, layer_swap: [{{layers: [0], layers: [8]}}]}}
train: {{steps: x, odd: 1, warmup_steps: 600}}
recompute: {{mode: full, mode: ful}}
recompute: {{mode: select, select_module: {{'(': [0], mlp: [9]}}, exclude_op: !odd x}}
train: 3
policy: full
"""
    assert [(line, path) for path, line, _ in found(text)] == [
        (4, "swap.enable"),
        (4, "swap.layer_swap[0].layers"),
        (4, "swap.layer_swap[0].layers[0]"),
        (5, "train"),
        (5, "train.steps"),
        (5, "train.odd"),
        *[(6, "recompute.mode")] * 4,
        (7, "recompute"),
        (7, "recompute.mode"),
        (7, "recompute.select_module['(']"),
        (7, "recompute.select_module.mlp[0]"),
        (7, "recompute.exclude_op"),
        (8, "train"),
        (8, "train"),
    ]


def test_the_default_prefetch_may_be_written_out_for_one_layer_while_swap_is_off() -> None:
    model = "model: {name: qwen3-tiny, config: {num_hidden_layers: 1}}\n"
    parse_config(model + DATA + "swap: {enable: false, default_prefetch: 1}\n")
    assert [path for path, *_ in found(model + DATA + "swap: {default_prefetch: 2}\n")] == ["swap.default_prefetch"]


def test_in_python_an_unknown_section_or_a_faulty_setting_of_memory_hides_no_other_fault() -> None:
    sections = {"recompute": {"mode": "fulll"}, "swap": {"layer_swap": [{"layers": [9]}]}, "swaps": {}}
    with pytest.raises(ConfigError) as caught:
        parse_sections(sections, 4)
    paths = ["swaps", "recompute.mode", "swap.layer_swap[0].layers[0]"]
    assert [fault.path for fault in caught.value.faults] == paths
    with pytest.raises(ConfigError) as caught:
        parse_sections_and_memory(sections, 4, {"tier": "moon"})
    assert [fault.path for fault in caught.value.faults] == [*paths, "memory.tier"]
