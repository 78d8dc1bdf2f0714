"""Plans: what they say, that they survive the file, and that a wrong one is refused with every reason at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_runs import (
    FunctionBlock,
    Stack,
    assert_same_steps,
    features,
    language_loss,
    language_steps,
    planned_copy,
    tiny_qwen3,
    token_batch,
)
from torch import Tensor, nn

from actmem.config.layers import from_ranges, to_ranges
from actmem.errors import ActmemError, PlanError
from actmem.models.regions import find_regions
from actmem.planning import POLICIES, Action, Fingerprint, Plan, Rule
from actmem.runtime import NoEffectWarning, apply
from actmem.runtime.apply import fingerprint

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=0, max_size=12)
LAYERS = st.none() | st.sets(st.integers(0, 40), max_size=8).map(lambda layers: tuple(sorted(layers)))
PATTERNS = st.one_of(
    TEXTS.map(lambda text: "".join(f"\\{c}" if c in r".^$*+?{}[]\|()#-&~ " else c for c in text)),
    st.sampled_from(
        [r".*", r"(.*\.)?mlp\..*", "no", "true", "12", "null", "#1", " x", "a: b", "é.*", r"\d+\.mm(#\d+)?"]
    ),
)
RULES = st.builds(Rule, pattern=PATTERNS, action=st.sampled_from(Action), layers=LAYERS)
FINGERPRINTS = st.builds(
    Fingerprint,
    model=TEXTS,
    regions=st.lists(st.sampled_from(["A-1", "B-2", "yes"]), max_size=6).map(tuple),
    dtypes=st.lists(TEXTS, max_size=2).map(tuple),
    inputs=st.lists(TEXTS, max_size=2).map(tuple),
    autocast=st.none() | st.sampled_from(["bfloat16", "null"]),
)
PLANS = st.builds(Plan, name=TEXTS, rules=st.lists(RULES, max_size=5).map(tuple), fingerprint=st.none() | FINGERPRINTS)


@settings(max_examples=100, deadline=None)
@given(plan=PLANS)
@example(plan=Plan("a\x85b\u2028", (Rule("c\x85d", Action.SAVE, label="\u2029e"),)))
def test_a_plan_comes_back_from_its_file_as_it_was(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.yaml"
    plan.save(path)
    read = Plan.load(path)
    assert read == replace(plan, rules=tuple(rule for rule in plan.rules if rule.layers != ()))
    read.save(path)
    assert Plan.load(str(path)) == read


@given(layers=st.sets(st.integers(0, 99)).map(lambda layers: tuple(sorted(layers))))
def test_layers_as_ranges_and_back(layers: tuple[int, ...]) -> None:
    assert from_ranges(to_ranges(layers)) == layers


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ActmemError)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "just a text",
        "rules: []",
        "actmem_plan: 2\nrules: []",
        "actmem_plan: 'one'\nrules: []",
        "actmem_plan: 1\nrules: [",
        "actmem_plan: 1\nname: a\nname: b",
        "actmem_plan: !!python/object/apply:os.getcwd []",
        b"\xff\xfe\x00actmem_plan: 1",
        b"\x00\x01\x02",
        "actmem_plan: 1\nrules: &a [*a]",
    ],
    ids=[
        "empty", "list", "text", "no version", "version", "text version", "syntax", "twice", "tag", "utf-16", "binary",
        "cycle",
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan_is_refused(content: str | bytes, tmp_path: Path) -> None:
    assert refusal(tmp_path / "plan.yaml", content)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rules: {ops: x}", "rules"),
        ("rules: null", "rules"),
        ("rules: [3]", r"rules[0]"),
        ("rules: [{action: save}]", r"rules[0].ops"),
        ("rules: [{ops: 3, action: save}]", r"rules[0].ops"),
        ("rules: [{ops: '(', action: save}]", r"rules[0].ops"),
        ("rules: [{ops: x}]", r"rules[0].action"),
        ("rules: [{ops: x, action: swop}]", r"rules[0].action"),
        ("rules: [{ops: x, action: [save]}]", r"rules[0].action"),
        ("rules: [{ops: x, action: save, layers: 3-1}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: [1, 1]}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: [-1]}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: [1.5]}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: [true]}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: {a: 1}}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: null}]", r"rules[0].layers"),
        ("rules: [{ops: x, action: save, layers: []}]", r"rules[0].layers: names no layer"),
        ("rules: [{opps: x, action: save}]", "did you mean 'ops'?"),
        ("rules: [{ops: x, action: swop}]", "did you mean 'swap'?"),
        ("rules: [{ops: x, action: save, layer: 1}]", "did you mean 'layers'?"),
        ("rules: [{ops: x, action: save, layer: 1}]", "layer"),
        ("rules: [{ops: x, action: save, from: 3}]", "rules[0].from"),
        ("rulez: []", "rulez"),
        ("name: [a]", "name"),
        ("fingerprint: []", "fingerprint"),
        ("fingerprint: {model: x}", "fingerprint: has no regions, dtypes, inputs, autocast; leave it"),
        ("fingerprint: {model: x, dtypes: [], inputs: [], autocast: x, regions: [{kind: a, layers: [1]}]}", "finger"),
        ("fingerprint: {model: x, dtypes: [], inputs: [], autocast: null, regions: 3}", "fingerprint"),
    ],
)  # fmt: skip
def test_every_kind_of_fault_is_named_with_its_place(fault: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path / "plan.yaml", f"actmem_plan: 1\n{fault}\n")


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    text = """
actmem_plan: 1
name: 7
colour: red
rules:
  - {ops: '(', action: save}
  - {ops: ok, action: swop, layers: [4, 2]}
  - {ops: ok, action: save, layers: nine}
  - nothing
fingerprint: 12
"""
    message = refusal(tmp_path / "plan.yaml", text)
    for words in (
        "name",
        "colour",
        "rules[0].ops",
        "rules[1].action",
        "rules[1].layers",
        "rules[2].layers",
        "rules[3]",
    ):
        assert words in message
    assert "8 faults" in message or "9 faults" in message


@pytest.mark.parametrize("tail", ["name: *d", "rules: {x: *d}", "rules: [{ops: a, action: *d}]", "fingerprint: *d"])
@pytest.mark.parametrize("times", [10, 40])
def test_a_short_file_gives_no_endless_message(tail: str, times: int, tmp_path: Path) -> None:
    """Aliases of aliases: with each line what is meant has ten times as many values, or more."""
    lines = ["actmem_plan: 1", "a: &a [x]"]
    for before, name in zip("abc", "bcd", strict=True):
        lines.append(f"{name}: &{name} [{','.join([f'*{before}'] * times)}]")
    assert len(refusal(tmp_path / "plan.yaml", "\n".join([*lines, tail]))) < 2000


def test_a_single_fault_is_not_called_faults(tmp_path: Path) -> None:
    assert "1 fault " in refusal(tmp_path / "plan.yaml", "actmem_plan: 1\nrules: [3]\n")


@pytest.mark.parametrize("plan", ["selektive", "", "no/such/file.yaml", Path("no-such-file.yaml"), Path()])
def test_what_is_neither_policy_nor_file_is_refused_with_the_policies(qwen3: nn.Module, plan: Any) -> None:
    with pytest.raises(PlanError, match="selective"):
        apply(qwen3, plan)


@pytest.mark.parametrize("plan", [None, 3, {"full": [0]}])
def test_what_is_no_plan_at_all_is_refused(qwen3: nn.Module, plan: Any) -> None:
    with pytest.raises(ActmemError):
        apply(qwen3, plan)


def plan_for(model: nn.Module, *rules: Rule) -> Plan:
    return Plan("made to measure", rules, fingerprint(model, find_regions(model)))


RECOMPUTE_MLP = Rule(r"mlp\..*", Action.RECOMPUTE)


def test_a_plan_from_a_file_runs_as_the_same_plan_does(qwen3: nn.Module, tmp_path: Path) -> None:
    plan = plan_for(qwen3, RECOMPUTE_MLP, Rule(r"mlp\.act_fn\..*", Action.SAVE), Rule(".*", Action.RECOMPUTE, (1,)))
    plan.save(tmp_path / "plan.yaml")
    expected = language_steps(tiny_qwen3(), [token_batch(step) for step in range(3)])
    stats = []
    for each in (plan, tmp_path / "plan.yaml", str(tmp_path / "plan.yaml")):
        planned, applied = planned_copy(qwen3, each)
        with applied:
            assert_same_steps(language_steps(planned, [token_batch(step) for step in range(3)]), expected)
        assert applied.name == "made to measure"
        stats.append(json.dumps(applied.stats.to_dict()))
    assert stats[0] == stats[1] == stats[2]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_hidden_layers": 3}, "2 layers, the model 3"),
        ({"hidden_size": 16}, "2 layers differ, first layer 0"),
        ({"intermediate_size": 64}, "2 layers differ"),
        ({"attention_bias": True}, "2 layers differ"),
    ],
)
def test_a_plan_for_another_model_is_refused_with_the_differences(other: dict[str, Any], words: str) -> None:
    plan = plan_for(tiny_qwen3(), RECOMPUTE_MLP)
    model = tiny_qwen3(**other)
    with pytest.raises(PlanError, match=words):
        apply(model, plan)
    apply(model, "full").remove()


def test_a_plan_for_another_family_and_dtype_names_both() -> None:
    plan = plan_for(tiny_qwen3(), RECOMPUTE_MLP)
    with pytest.raises(PlanError) as caught:
        apply(tiny_qwen3("grouped_mm").bfloat16(), plan)
    for words in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "float32", "bfloat16"):
        assert words in str(caught.value)


def test_a_plan_that_speaks_of_layers_beyond_the_last_is_refused(qwen3: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"layer 5.*layers 0-1"):
        apply(qwen3, Plan("long", (Rule(".*", Action.RECOMPUTE, (1, 5)),)))


def test_rules_speak_of_their_layers_only_and_the_last_one_wins(qwen3: nn.Module) -> None:
    rules = (
        Rule(".*", Action.RECOMPUTE, (1,)),
        Rule(r"self_attn\..*", Action.SAVE),
        Rule(r"self_attn\.q_norm\..*", Action.RECOMPUTE, (0,)),
    )
    planned, applied = planned_copy(qwen3, Plan("mixed", rules))
    with applied:
        language_loss(token_batch())(planned).backward()
    first, second = applied.stats.regions
    assert 0 < first.dropped_bytes < second.dropped_bytes
    assert 0 < first.num_replayed_ops < second.num_replayed_ops


def test_patterns_match_the_whole_path_and_nothing_in_the_middle() -> None:
    rule = Rule("mlp", Action.RECOMPUTE)
    assert rule.matches("mlp") and not rule.matches("mlp.up_proj.mm") and not rule.matches("the.mlp")


def test_invariant_13_a_rule_that_matches_nothing_is_a_warning(qwen3: nn.Module) -> None:
    rules = (RECOMPUTE_MLP, Rule(r"mlq\..*", Action.RECOMPUTE), Rule("also not", Action.SAVE, (1,)))
    planned, applied = planned_copy(qwen3, Plan("typo", rules))
    with applied:
        with pytest.warns(NoEffectWarning, match=r"typo.*mlq.*also not.*layers 1"):
            language_loss(token_batch())(planned).backward()
        for step in range(3):
            language_loss(token_batch(step, length=12 + step))(planned).backward()
    assert applied.stats.num_replayed_ops > 0


def test_invariant_13_a_rule_that_matches_nothing_is_an_error_under_strict_matching(qwen3: nn.Module) -> None:
    planned, applied = planned_copy(qwen3, Plan("typo", (Rule(r"mlq\..*", Action.RECOMPUTE),)), strict_matching=True)
    with applied, pytest.raises(PlanError, match="mlq"):
        language_loss(token_batch())(planned).backward()


def test_invariant_13_strict_matching_accepts_a_plan_that_matches(qwen3: nn.Module) -> None:
    for plan in ("full", "mlp", "selective", Plan("good", (RECOMPUTE_MLP,))):
        planned, applied = planned_copy(qwen3, plan, strict_matching=True)
        with applied:
            assert_same_steps(language_steps(planned, [token_batch()]), language_steps(tiny_qwen3(), [token_batch()]))


def test_invariant_13_a_rule_that_frees_nothing_is_a_warning(qwen3: nn.Module) -> None:
    """Autograd saves nothing of what the last projection gives, so recomputing it moves no byte."""
    planned, applied = planned_copy(qwen3, Plan("idle", (Rule(r"mlp\.down_proj\..*", Action.RECOMPUTE),)))
    with applied, pytest.warns(NoEffectWarning, match="down_proj"):
        language_loss(token_batch())(planned).backward()
    assert applied.stats.dropped_bytes == 0


def test_invariant_13_policies_that_find_nothing_to_do_say_so() -> None:
    model = Stack(FunctionBlock(lambda block, hidden: block.linear(hidden).tanh()))
    planned, applied = planned_copy(model, "mlp", regions=["blocks.0"])
    with applied, pytest.warns(NoEffectWarning, match="mlp"):
        planned(features(4, 8)).sum().backward()


def test_invariant_13_a_warning_comes_even_if_one_layer_never_runs() -> None:
    class HalfUsed(Stack):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.blocks[0](hidden)

    model = HalfUsed(*[FunctionBlock(lambda block, hidden: block.linear(hidden).tanh()) for _ in range(2)])
    plan = Plan("typo", (Rule("nothing at all", Action.RECOMPUTE),))
    planned, applied = planned_copy(model, plan, regions=["blocks.0", "blocks.1"])
    with applied, pytest.warns(NoEffectWarning, match="nothing at all"):
        for _ in range(5):
            planned(features(4, 8)).sum().backward()


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
def test_what_is_held_and_dropped_adds_up(qwen3: nn.Module, policy: str) -> None:
    planned, applied = planned_copy(qwen3, policy)
    unplanned, everything = planned_copy(qwen3, "none")
    with applied, everything:
        language_loss(token_batch())(planned).backward()
        language_loss(token_batch())(unplanned).backward()
    for mine, all_held in zip(applied.stats.regions, everything.stats.regions, strict=True):
        assert mine.held_bytes == sum(mine.held_bytes_by_reason.values())
        assert all_held.dropped_bytes == 0
        assert mine.held_bytes < all_held.held_bytes
        assert all_held.held_bytes <= mine.held_bytes + mine.dropped_bytes + mine.swapped_bytes
    report = applied.stats.to_dict()
    assert report["held_bytes"] == sum(region["held_bytes"] for region in report["regions"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.up_proj = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + torch.tanh(self.up_proj(x).sin())


def test_a_module_of_ones_own_is_not_judged_by_the_paths_of_qwen3() -> None:
    model = nn.Sequential(Block(), Block())
    sections = {
        "recompute": {"mode": "select", "select_module": {".*attn": [0]}},
        "swap": {"enable": True, "op_swap": [{"op_name": ".*_proj", "layers": [0]}]},
    }
    inputs = torch.randn(4, 16)
    model(inputs).sum().backward()
    expected = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    with apply(model, sections, regions=["0", "1"], memory={"min_swap_bytes": 0, "tier": "disk"}):
        model(inputs).sum().backward()
    found_gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert all(map(torch.equal, found_gradients, expected))
