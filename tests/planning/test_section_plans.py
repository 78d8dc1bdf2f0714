"""From the sections of a configuration to rules, and that patterns mean what the documents say they mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actmem.config.known_paths import KNOWN_PATHS
from actmem.config.loading import parse_config
from actmem.config.op_names import is_communication, names_of, split_path
from actmem.errors import PlanError
from actmem.planning import Action, Plan, Rule
from actmem.planning.plan import RuleSet
from actmem.planning.sections import name_of, pattern_of_excluded, plan_of, plan_of_sections

HEAD = "model: {name: qwen3-tiny}\ndata: {path: [a.txt]}\n"
COLLECTIVES = [
    f"self_attn.q_proj.{op}" for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
] + ["mlp.all_reduce", "mlp.all_reduce#1", "mlp.wait_tensor", "mlp.all_gather_into_tensor_coalesced"]
ALONE = tuple(path for path in KNOWN_PATHS if not is_communication(split_path(path)[1]))
PATHS = (*ALONE, *COLLECTIVES, "input")


def plan(text: str) -> Plan:
    return plan_of_sections(parse_config(HEAD + text))


def actions(text: str, layer: int) -> dict[str, Action]:
    rules = RuleSet(plan(text).rules_for(layer))
    return {path: rules.action_of(path) for path in PATHS}


def with_action(text: str, layer: int, action: Action) -> set[str]:
    return {path for path, found in actions(text, layer).items() if found is action}


def below(*modules: str) -> set[str]:
    return {path for path in PATHS if any(path.startswith(f"{module}.") for module in modules)}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("recompute: {mode: full, full_recompute_layer: [0-1]}", (Rule(".*", Action.RECOMPUTE, (0, 1)),)),
        (
            "recompute: {mode: select, select_module: {'.*mlp': [0-3]}, full_recompute_layer: [1]}",
            (Rule(".*mlp", Action.RECOMPUTE, (0, 1, 2, 3), reach="below"), Rule(".*", Action.RECOMPUTE, (1,))),
        ),
        (
            "recompute_comm: {enable: true, select_module: {'.*all_gather': [0-3]}}",
            (Rule(".*all_gather", Action.RECOMPUTE, (0, 1, 2, 3), reach="communication"),),
        ),
        (
            "swap: {enable: true, layer_swap: [{layers: [1]}, {layers: [0]}], op_swap: [{op_name: mlp, layers: [2]}]}",
            (Rule("mlp", Action.SWAP, (2,), reach="below"), Rule(".*", Action.SWAP, (0, 1))),
        ),
        ("activation_swap: attention", (Rule(r"(.*\.)?self_attn\..*", Action.SWAP),)),
        (
            "recompute: {mode: full, full_recompute_layer: [0-1], exclude_op: {mlp: [1-3]}}",
            (Rule(".*", Action.RECOMPUTE, (0, 1)), Rule("mlp", Action.SAVE, (1,), reach="below")),
        ),
    ],
)
def test_sections_become_rules(text: str, rules: tuple[Rule, ...]) -> None:
    assert plan(text).rules == rules


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("recompute: {mode: full, full_recompute_layer: [0-1, 3]}", "recompute full 0-1, 3"),
        ("recompute: {mode: full, full_recompute_layer: [0]}\nswap: {enable: true, layer_swap: [{layers: [2]}]}",
         "recompute full 0 + swap 2"),
        ("activation_swap: attention\nrecompute_comm: {enable: true, select_module: {a: [1]}}",
         "recompute_comm 1 + activation_swap attention"),
    ],
)  # fmt: skip
def test_a_plan_of_sections_tells_what_it_does_by_its_name(text: str, name: str) -> None:
    assert plan(text).name == name == name_of(plan(text))


def test_whichever_way_is_used_there_is_something_to_apply(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    Plan("p").save(file)
    assert plan_of(parse_config(HEAD)) == "none"
    assert plan_of(parse_config(HEAD + "recompute: {mode: None}\nswap: {layer_swap: [{layers: [0]}]}")) == "none"
    assert plan_of(parse_config(HEAD + "policy: selective")) == "selective"
    assert plan_of(parse_config(HEAD + f"plan: {file}")) == file
    assert plan_of(parse_config(HEAD + "activation_swap: attention")) == plan("activation_swap: attention")
    assert (name_of(file), name_of("full")) == (str(file), "full")


def test_prefetch_comes_from_the_configuration() -> None:
    assert plan("swap: {enable: true, default_prefetch: 2, layer_swap: [{layers: [0]}]}").prefetch == 2


def test_a_module_covers_what_is_below_it_and_no_other_module() -> None:
    text = "recompute: {mode: select, select_module: {'.*mlp': [0-1]}}"
    assert with_action(text, 0, Action.RECOMPUTE) == below("mlp")
    assert with_action(text, 2, Action.RECOMPUTE) == set()


def test_an_op_may_be_named_without_its_number_or_by_a_familiar_name() -> None:
    select = "recompute: {mode: select, select_module: {'%s': [0]}}"
    assert with_action(select % r"mlp\.mul", 0, Action.RECOMPUTE) == {"mlp.mul"}
    assert with_action(select % r"self_attn\.mul#1", 0, Action.RECOMPUTE) == {"self_attn.mul#1"}
    assert len(with_action(select % r"self_attn\.mul", 0, Action.RECOMPUTE)) == 5
    for familiar in ("flash_attention", "sdpa", "FlashAttentionScore", "_scaled_dot_product_flash_attention"):
        found = with_action(select % rf".*\.{familiar}", 0, Action.RECOMPUTE)
        assert found == {"self_attn.scaled_dot_product_attention"}


def test_alternatives_flags_anchors_and_lookaheads_keep_their_meaning() -> None:
    select = "recompute: {mode: select, select_module: {'%s': [0]}}"
    assert with_action(select % "mlp|self_attn", 0, Action.RECOMPUTE) == below("mlp", "self_attn")
    assert with_action(select % "(?i)MLP", 0, Action.RECOMPUTE) == below("mlp")
    assert with_action(select % "^mlp$", 0, Action.RECOMPUTE) == below("mlp")
    assert with_action(select % "(?!.*proj)mlp", 0, Action.RECOMPUTE) == below("mlp")
    assert with_action(select % r"mlp\.(gate|up)_proj", 0, Action.RECOMPUTE) == below("mlp.gate_proj", "mlp.up_proj")


def test_excluded_ops_are_saved_where_their_layer_is_recomputed_and_nowhere_else() -> None:
    text = "recompute: {mode: full, full_recompute_layer: [0-1], exclude_op: [%s]}"
    saved = with_action(text % "AllGather, REDUCESCATTER", 1, Action.SAVE)
    assert saved == {
        "self_attn.q_proj.all_gather_into_tensor",
        "self_attn.q_proj.reduce_scatter_tensor",
        "mlp.all_gather_into_tensor_coalesced",
    }
    assert with_action(text % "mlp", 0, Action.SAVE) == set()  # it is a module, not an op
    assert all(op.rpartition(".")[2].startswith("mul") for op in with_action(text % "MUL", 0, Action.SAVE))
    assert plan(text % "mm").rules[1].layers == (0, 1)


@pytest.mark.parametrize("text", ["mm", "aten::mm", "aten.mm.default", "MM"])
def test_an_excluded_op_is_a_part_of_the_name_alone(text: str) -> None:
    pattern = pattern_of_excluded(text)
    matching = {path for path in PATHS if re.fullmatch(pattern, path)}
    assert matching == {path for path in PATHS if "mm" in path.rpartition(".")[2].partition("#")[0]}
    assert not re.fullmatch(pattern, "mm_block.add") and not re.fullmatch(pattern, "mlp.add#mm")


@given(st.text("ab.*+?()[]|\\^$#", min_size=1, max_size=6))
def test_any_excluded_text_is_taken_literally(text: str) -> None:
    names = ("a", "ab", "b+a", "a*(b)", "[ab]|", "\\^$", "?")
    for name in names:
        assert bool(re.fullmatch(pattern_of_excluded(text), f"mlp.{name}")) == (text in name)


def test_communication_is_recomputed_under_its_own_and_its_familiar_names() -> None:
    text = r"recompute_comm: {enable: true, select_module: {'.*\.%s': [0]}}"
    gathers = with_action(text % "all_gather", 0, Action.RECOMPUTE)
    assert gathers == {
        "self_attn.q_proj.all_gather_into_tensor",
        "mlp.all_gather_into_tensor_coalesced",
    }
    assert with_action(text % "all_reduce", 0, Action.RECOMPUTE) == {"mlp.all_reduce", "mlp.all_reduce#1"}
    assert with_action(text % "wait_tensor", 0, Action.RECOMPUTE) == {"mlp.wait_tensor"}
    assert with_action(text % "*", 0, Action.RECOMPUTE) == set(COLLECTIVES)
    assert with_action(text.replace(r".*\.%s", "mlp"), 0, Action.RECOMPUTE) == set()


def test_communication_recompute_has_its_way_over_exclude_op() -> None:
    text = (
        "recompute: {mode: full, full_recompute_layer: [0], exclude_op: [AllReduce]}\n"
        r"recompute_comm: {enable: true, select_module: {'.*\.all_reduce': [0]}}"
    )
    assert "mlp.all_reduce" not in with_action(text, 0, Action.SAVE)


def test_swapped_layers_take_their_inputs_along_and_swapped_attention_does_not() -> None:
    assert with_action("swap: {enable: true, layer_swap: [{layers: [0]}]}", 0, Action.SWAP) == set(PATHS)
    for layer in range(4):
        assert with_action("activation_swap: attention", layer, Action.SWAP) == below("self_attn")


def familiar_names(path: str) -> list[str]:
    module, name = split_path(path)
    return [module + familiar for familiar in names_of(name)[1:]]


PIECES = [
    r"mlp",
    r"self_attn",
    r"\.",
    r".*",
    r"[^.]+",
    r"act_fn",
    r"gate_proj",
    r"q_proj",
    r"mm",
    r"mul",
    r"silu",
    r"_",
    r"|",
    r"?",
    r"$",
    r"(?i)",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join))
@example(r"self_attn\._.*")
def test_a_pattern_means_what_the_documents_say(pattern: str) -> None:
    """The list of all modules and ops of a layer is matched as a whole; a module that matches covers what is below. An
    op has its familiar names beside its own."""
    try:
        re.compile(pattern)
    except re.error:
        return
    modules = {path[:end] for path in KNOWN_PATHS for end, character in enumerate(path) if character == "."}
    whitelist = modules | {path.partition("#")[0] for path in KNOWN_PATHS} | set(KNOWN_PATHS)
    hits = {path for path in whitelist if re.fullmatch(pattern, path)}
    covered = {path for path in KNOWN_PATHS for hit in hits if path == hit or path.startswith((f"{hit}.", f"{hit}#"))}
    covered |= {path for path in KNOWN_PATHS if any(re.fullmatch(pattern, name) for name in familiar_names(path))}
    rule = Rule(pattern, Action.RECOMPUTE, reach="below")
    assert {path for path in KNOWN_PATHS if rule.matches(path)} == covered


def test_the_reach_of_a_rule_survives_the_file(tmp_path: Path) -> None:
    text = (
        r"recompute: {mode: select, select_module: {'.*mlp': [0-1]}, exclude_op: ['a.b', sdpa]}" + "\n"
        r"recompute_comm: {enable: true, select_module: {'.*\.all_gather': [2]}}" + "\n"
        "swap: {enable: true, default_prefetch: 2, op_swap: [{op_name: self_attn, layers: [0-1]}]}"
    )
    made = plan(text)
    made.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == made


LABELS = [
    r"recompute.select_module '.*mlp'",
    "recompute.full_recompute_layer",
    "recompute.exclude_op 'a.b'",
    "recompute.exclude_op 'mm'",
    r"recompute_comm.select_module '.*\.all_gather'",
    "swap.op_swap 'self_attn'",
    "swap.layer_swap",
]


def test_rules_are_named_as_their_settings_were_written_in_plan_files_too(tmp_path: Path) -> None:
    made = plan(
        r"recompute: {mode: select, select_module: {'.*mlp': [0]}, full_recompute_layer: [1], exclude_op: ['a.b', mm]}"
        "\n"
        r"recompute_comm: {enable: true, select_module: {'.*\.all_gather': [3]}}" + "\n"
        "swap: {enable: true, layer_swap: [{layers: [2]}], op_swap: [{op_name: self_attn, layers: [0]}]}"
    )
    made.save(tmp_path / "plan.yaml")
    assert [rule.name for rule in made.rules] == LABELS
    assert [rule.name for rule in Plan.load(tmp_path / "plan.yaml").rules] == LABELS
    assert [rule.name for rule in plan("activation_swap: attention").rules] == ["activation_swap"]
    assert Rule("a", Action.SAVE).name == "'a'"


def test_a_reach_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("actmem_plan: 1\nrules: [{ops: '(a|a)*', action: save, reach: above}]\n")
    with pytest.raises(PlanError) as caught:
        Plan.load(file)
    assert "rules[0].reach: 'above'; allowed: ['below', 'communication', 'op']" in str(caught.value)
    assert "blows up" in str(caught.value)


def test_a_rule_that_takes_too_long_on_a_path_says_so() -> None:
    with pytest.raises(PlanError, match="takes over"):
        Rule("(a|a)*", Action.SAVE).matches("a" * 60 + "!")


@pytest.mark.parametrize("text", ["InnerComm", "innercomm", "InnerCommAllGather"])
def test_the_name_that_all_collectives_have_elsewhere_means_these_alone(text: str) -> None:
    matching = {path for path in PATHS if re.fullmatch(pattern_of_excluded(text), path)}
    assert matching
    assert all(is_communication(path.rpartition(".")[2].partition("#")[0]) for path in matching)
