"""Every fault of a text in one error: where it stands, what is wrong, what is allowed, what was meant."""

from __future__ import annotations

import time

import pytest

from actmem.config.loading import parse_config
from actmem.config.schema import PRESET_NAMES, RunConfig
from actmem.errors import ConfigError, Fault

SOUND = "model: {name: qwen3-tiny}\ndata: {path: [a.txt]}\n"


def faults_of(text: object, *overrides: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.yaml", overrides)  # type: ignore[arg-type]
    return caught.value.faults


def only_fault(text: object, *overrides: str) -> Fault:
    (fault,) = faults_of(text, *overrides)
    return fault


def with_train(entry: str) -> str:
    return f"{SOUND}train:\n  {entry}\n"


def test_a_sound_text_becomes_a_frozen_configuration_with_defaults() -> None:
    config = parse_config(SOUND + "train: {lr: 1, betas: [0.5, 0]}\n")
    assert isinstance(config, RunConfig)
    assert (config.train.lr, config.train.betas, config.train.steps) == (1.0, (0.5, 0.0), 100)


def test_the_model_section_of_the_design_loads() -> None:
    model = "{name: qwen3-8b, dtype: bfloat16, attn_implementation: sdpa, experts_implementation: grouped_mm}"
    config = parse_config(f"model: {model}\ndata: {{path: [a]}}\n")
    assert (config.model.name, config.model.dtype) == ("qwen3-8b", "bfloat16")


def test_numbers_are_read_as_yaml_1_2_reads_them() -> None:
    train = parse_config(with_train("{lr: 3e-4, steps: 010, device: no}")).train
    assert (train.lr, train.steps, train.device) == (3e-4, 10, "no")


def test_all_faults_come_at_once_in_the_order_of_the_file() -> None:
    text = """\
model: {name: qwen3-9b, dtype: fp32}
data:
  path: corpus.txt
  path: [corpus.txt]
train:
  steps: "10"
  stepz: 3
  lr: .inf
  resume: yes
  betas: [1.0, 0.9]
policy: Full
memory:
"""
    found = [(fault.line, fault.column, fault.path) for fault in faults_of(text)]
    assert found == [
        (1, 9, "model.name"),
        (1, 25, "model.dtype"),
        (3, 3, "data.path"),
        (4, 3, "data.path"),
        (6, 3, "train.steps"),
        (7, 3, "train.stepz"),
        (8, 3, "train.lr"),
        (9, 3, "train.resume"),
        (10, 11, "train.betas[0]"),
        (11, 1, "policy"),
        (12, 1, "memory"),
    ]


@pytest.mark.parametrize(
    ("entry", "problem", "allowed"),
    [
        ('steps: "10"', "'10' is text", "a whole number of at least 1"),
        ("steps: true", "true is a truth value", "a whole number of at least 1"),
        ("steps: 2.5", "2.5 is a number", "a whole number of at least 1"),
        ("steps: 0", "0 is out of range", "a whole number of at least 1"),
        ("steps:", "is empty (null)", "a whole number of at least 1"),
        ("steps: [1]", "[1] is a list", "a whole number of at least 1"),
        ("lr: .inf", "inf is not finite", "a number above 0"),
        ("lr: .nan", "nan is not finite", "a number above 0"),
        ("lr: 1e999", "inf is not finite", "a number above 0"),
        ("lr: true", "true is a truth value", "a number above 0"),
        ("grad_clip: -1", "-1 is out of range", "a number above 0 or null"),
        ("min_lr_share: 1.5", "1.5 is out of range", "a number of at least 0 and of at most 1"),
        ("resume: 1", "1 is a whole number", "true or false"),
        ("device: 0", "0 is a whole number", "text"),
        ("device: ''", "'' is empty", "text"),
        ("output_dir: ''", "'' is empty", "a path"),
        ("output_dir: 3", "3 is a whole number", "a path"),
        ("output_dir: {a: 1}", "{'a': 1} is a section", "a path"),
        ("autocast: float16", "'float16' is not among the allowed names", "bfloat16 or null"),
        ("steps: 99999999999999999999", "is a number of more than 64 bits", None),
        ("steps: !!int x", "'x' cannot be read as a number or truth value", None),
        ("steps: !thing 3", "has the tag '!thing'", "plain YAML without tags"),
        ("device: !!python/object:os.system x", "has the tag '!!python/object:os.system'", "plain YAML without tags"),
        ("device: !!binary aGk=", "has the tag '!!binary'", "plain YAML without tags"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(entry: str, problem: str, allowed: str | None) -> None:
    fault = only_fault(with_train(entry))
    assert (fault.problem, fault.allowed) == (problem, allowed)
    assert (fault.path, fault.line, fault.column) == (f"train.{entry.partition(':')[0]}", 4, 3)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("memory_budget: 40 apples", "'40 apples' is not a number of bytes"),
        ("memory_budget: -3GiB", "'-3GiB' is not a number of bytes"),
        ("memory_budget: 9999999999GiB", "'9999999999GiB' is more bytes than any device has"),
        ("memory_budget: 150%", "'150%' is no share: one lies above 0"),
        ("memory_budget: 1.5", "1.5 is no share: one lies above 0"),
        ("memory_budget: 0", "0 is not above 0"),
        ("memory_budget: -1", "-1 is not above 0"),
        ("memory_budget: true", "true is neither a number of bytes nor a share"),
        ("memory_budget: ''", "'' is empty"),
        ("memory_budget: [1]", "[1] is neither a number of bytes nor a share"),
        ("memory: {host_limit: 3 apples}", "'3 apples' is not a number of bytes"),
    ],
)
def test_bytes_and_shares_are_refused_for_what_is_wrong_with_them(entry: str, problem: str) -> None:
    text = "model: {name: qwen3-tiny}\ndata: {path: [a.txt]}\n" + entry
    assert only_fault(text).problem.startswith(problem)


def test_a_list_of_the_wrong_length_or_kind_is_a_fault() -> None:
    assert only_fault(with_train("betas: [0.9, 0.95, 0.99]")).problem == "[0.9, 0.95, 0.99] has 3 entries"
    assert only_fault(with_train("betas: [0.9]")).path == "train.betas[1]"
    assert only_fault("model: {name: qwen3-tiny}\ndata: {path: []}").problem == "[] is empty"
    assert only_fault("model: {name: qwen3-tiny}\ndata: {path: [a, 3]}").path == "data.path[1]"


@pytest.mark.parametrize(
    ("text", "path", "nearest"),
    [
        (with_train("stepz: 3"), "train.stepz", "steps"),
        (with_train("Micro-Batch-Size: 3"), "train.Micro-Batch-Size", "micro_batch_size"),
        (SOUND + "trian: {}", "trian", "train"),
        (SOUND + "lr: 3", "lr", "train.lr"),
        (SOUND + "xyzzy: 3", "xyzzy", None),
        (SOUND + "policy: Selectiv", "policy", "selective"),
        ("model: {name: Qwen3_0.6B}\ndata: {path: [a]}", "model.name", "qwen3-0.6b"),
        ("model: {name: qwen3-tiny, dtype: bf16}\ndata: {path: [a]}", "model.dtype", "bfloat16"),
    ],
)
def test_the_nearest_valid_name_is_offered(text: str, path: str, nearest: str | None) -> None:
    fault = only_fault(text)
    assert (fault.path, fault.nearest) == (path, nearest)


def test_an_unknown_preset_lists_all_of_them() -> None:
    allowed = only_fault("model: {name: gpt}\ndata: {path: [a]}").allowed
    assert allowed is not None
    assert allowed.removesuffix(" or null").split(", ") == list(PRESET_NAMES)


def test_missing_keys_stand_at_the_section_that_lacks_them() -> None:
    model, path = faults_of("data:\n  vocab_size: 300\n")
    assert (path.path, path.problem, path.line) == ("data.path", "is missing", 1)
    assert (model.path, model.problem, model.line) == ("model", "is missing", 1)
    assert path.allowed == "a list of text"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null"])
def test_an_empty_text_is_a_fault(text: str) -> None:
    fault = only_fault(text)
    assert (fault.path, fault.problem) == ("top level", "is empty (null)")


@pytest.mark.parametrize("text", ["- a\n", "just text", "42", "[]"])
def test_anything_but_a_mapping_is_a_fault(text: str) -> None:
    fault = only_fault(text)
    assert (fault.path, fault.line) == ("top level", 1)
    assert fault.allowed == (
        "a section with the keys model, data, train, parallel, memory_budget, hardware, policy, plan, "
        "activation_swap, recompute, recompute_comm, swap, memory, platform, allow_unverified_model"
    )


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (SOUND + "train: {steps: 3\n", 4, "broken syntax"),
        (SOUND + "a: b: c\n", 3, "mapping values are not allowed here"),
        (SOUND + "\ttrain: 3\n", 3, "cannot start any token"),
        (SOUND + "plan: *nowhere\n", 3, "undefined alias 'nowhere'"),
        (SOUND + "---\nmodel: {}\n", 3, "another document"),
        (SOUND + "plan: \x07\n", 3, "the character U+0007 may not stand here"),
        ('a: "\\UFFFFFFFF"', 1, "cannot be read"),
        ("[" * 1000, 1, "nested too deeply"),
    ],
)
def test_broken_syntax_is_one_fault_with_its_line(text: str, line: int, words: str) -> None:
    fault = only_fault(text)
    assert words in fault.problem
    assert (fault.path, fault.line) == ("YAML", line)


def test_a_key_given_twice_names_both_lines() -> None:
    fault = only_fault(SOUND + "policy: full\npolicy: none\n")
    assert (fault.path, fault.line, fault.problem) == ("policy", 4, "is given twice")
    assert fault.allowed == "each key once; the first stands on line 3"


def test_keys_must_be_text() -> None:
    number, composed = faults_of(SOUND + "3: x\n? [a]\n: y\n")
    assert (number.path, number.line, number.problem) == (
        "top level",
        3,
        "has the key '3', which does not read as text",
    )
    assert (composed.line, composed.problem) == (4, "has a section or list for a key, which does not read as text")
    assert "merge key" in only_fault(with_train("<<: {steps: 3}")).problem


def test_anchors_work_and_may_be_set_anew() -> None:
    config = parse_config("model: {name: &n qwen3-tiny}\ndata: {path: [*n]}\ntrain: {device: &n cpu}\npolicy: none\n")
    assert config.data.path == ["qwen3-tiny"]


def test_a_value_that_contains_itself_is_a_fault() -> None:
    assert only_fault("model: {name: qwen3-tiny, config: &c {a: *c}}\ndata: {path: [a]}").problem == "contains itself"


def test_aliases_of_aliases_do_not_grow_without_bound() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 30)]
    lines = ["model:", "  name: qwen3-tiny", "  config:", "    l0: &l0 [x]", *(f"    {level}" for level in levels)]
    text = "\n".join([*lines, "data: {path: [*l29]}"])
    assert only_fault(text).problem.startswith("stands for more than 100000 values")


def test_an_answer_is_no_longer_for_aliases_of_aliases() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 4)]
    text = SOUND + "\n".join(["l0: &l0 [x]", *levels, "activation_swap: *l3", ""])
    assert all(len(str(fault)) < 1000 for fault in faults_of(text))


def test_a_key_that_is_a_number_neither_hides_nor_adds_faults() -> None:
    faults = faults_of(SOUND + "recompute: {mode: select, select_module: {1: [9999]}}\n")
    assert [fault.path for fault in faults] == ["recompute.select_module", "recompute.select_module.1[0]"]
    assert "beyond the last layer" in faults[1].problem


def test_what_could_not_be_read_has_no_second_fault_where_an_alias_repeats_it() -> None:
    assert only_fault(with_train("{steps: &s !odd 3, warmup_steps: *s}")).path == "train.steps"


def test_half_a_surrogate_pair_is_refused_and_never_printed_raw() -> None:
    fault = only_fault(with_train('device: "\\ud800"'))
    assert fault.problem == "holds half of a surrogate pair"
    assert str(faults_of(SOUND + '"\\ud800": 3\n')[0]).isascii()


def test_control_characters_in_keys_are_escaped() -> None:
    fault = only_fault(SOUND + '"\\e[31m": 3\n')
    assert fault.path == "'\\x1b[31m'"


def test_no_fault_carries_the_wording_of_pydantic() -> None:
    text = "model: {name: 3, path: [], config: 1}\ndata: 3\ntrain: {steps: x, lr: -1, betas: 3, z: 1}\nplan: {}\n"
    for fault in faults_of(text):
        for word in ("Input", "should be", "valid ", "Field required", "permitted", "pydantic"):
            assert word not in str(fault)


def test_a_mapping_is_checked_the_same_way_without_lines() -> None:
    fault = only_fault({"model": {"name": "qwen3-tiny"}, "data": {"path": ["a"]}, "train": {"steps": "10"}})
    assert (fault.path, fault.problem, fault.line) == ("train.steps", "'10' is text", None)
    section, top = faults_of({"model": {"name": "qwen3-tiny", 1: 2}, "data": {"path": ["a"]}, 3: 4})
    assert (section.path, top.path, top.problem) == ("model", "top level", "has the key 3, which does not read as text")


def test_a_mapping_may_hold_sections() -> None:
    whole = parse_config(SOUND + "train: {steps: 20}")
    again = parse_config({"model": whole.model, "data": whole.data, "train": whole.train}, overrides=["train.seed=1"])
    assert (again.train.steps, again.train.seed) == (20, 1)
    assert parse_config(whole.model_dump(exclude_none=True)) == whole


def test_a_configuration_survives_json() -> None:
    whole = parse_config(SOUND + "train: {betas: [0, 0.5]}\nmemory: {verify: off}\n")
    assert RunConfig.model_validate_json(whole.model_dump_json()) == whole


MINIMAL = {"model": {"name": "qwen3-tiny"}, "data": {"path": ["a"]}}


@pytest.mark.parametrize("key", [None, float("nan"), ("a",), 1.5, b"mode", 10**5000], ids=range(6))
@pytest.mark.parametrize("inside", [False, True])
def test_keys_of_a_mapping_that_are_no_text(key: object, inside: bool) -> None:
    odd = {"recompute": {key: 1}} if inside else {key: 1}
    fault = only_fault({**MINIMAL, **odd})
    assert fault.path == ("recompute" if inside else "top level")
    assert "which does not read as text" in fault.problem


def test_a_number_of_a_mapping_that_is_too_large() -> None:
    swap = {"enable": True, "default_prefetch": 10**5000, "layer_swap": [{"layers": [0]}]}
    fault = only_fault({**MINIMAL, "swap": swap})
    assert (fault.path, fault.problem) == ("swap.default_prefetch", "is a number of more than 64 bits")


def test_a_faulty_name_of_an_op_does_not_hide_the_faults_beside_it() -> None:
    swap = {"enable": True, "op_swap": [{"op_name": 1, "layers": [9, "3-1"]}, {"layers": [7]}]}
    found = [fault.path for fault in faults_of({**MINIMAL, "swap": swap})]
    assert "swap.op_swap[0].op_name" in found
    assert "swap.op_swap[1].op_name" in found
    assert {"swap.op_swap[0].layers[0]", "swap.op_swap[0].layers[1]"} & set(found)
    assert "swap.op_swap[1].layers[0]" in found


def test_many_slow_patterns_are_given_up_together() -> None:
    slow = {r"(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5\6x" + "(?:)" * index: [0] for index in range(20)}
    started = time.perf_counter()
    found = faults_of({**MINIMAL, "recompute": {"mode": "select", "select_module": slow}})
    assert time.perf_counter() - started < 10
    assert len(found) == 20
    assert "comes behind others that took over 4 s" in found[-1].problem
