"""What `actmem check` finds on the layers of a model, with its place in the file, and that training says the same."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from actmem.cli import main
from actmem.config import patterns
from actmem.config.loading import load_config
from actmem.config.schema import RunConfig
from actmem.errors import ConfigError, PlanError
from actmem.models.building import build_model
from actmem.planning.sections import plan_of
from actmem.runtime import NoEffectWarning, apply
from actmem.training.trainer import train

CONFIG = """\
model: {name: qwen3-tiny, config: {hidden_act: gelu, vocab_size: 300, num_hidden_layers: 4}}
data: {path: [nothing-is-read.txt], sequence_length: 16}
memory: {min_swap_bytes: 0}
train: {device: cpu}
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, [*map(str, arguments)])


def check(path: Path, text: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    path.write_text(CONFIG + text)
    result = CliRunner().invoke(main.app, ["check", str(path), *arguments, "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


GELU = """\
recompute:
  mode: select
  select_module: {'.*mlp': [0-2]}
swap:
  enable: true
  op_swap:
    - {op_name: '.*q_proj', layers: [0]}
    - {op_name: '.*gelu', layers: [1-2]}
"""
CLASH = "is also recomputed, by recompute.select_module '.*mlp': mlp.act_fn.gelu in layers 1-2"


def test_an_op_that_only_this_model_has_cannot_be_recomputed_and_swapped(config: Path) -> None:
    code, told = check(config, GELU)
    assert code == 2
    (fault,) = told["faults"]
    assert (fault["path"], fault["problem"]) == ("swap.op_swap[1].layers", CLASH)
    assert (fault["line"], fault["column"]) == (12, 27)
    assert fault["allowed"] == "layers and modules that are either recomputed or swapped"


def test_an_overlap_is_told_once_where_the_text_alone_shows_it(config: Path) -> None:
    code, told = check(config, GELU.replace(".*gelu", r"mlp\.up_proj"))
    assert code == 2
    assert [fault["path"] for fault in told["faults"]] == ["swap.op_swap[1].layers"]


SELECT = "recompute: {mode: select, select_module: {'%s': [0-1]}}\n"
COMM = "recompute_comm: {enable: true, select_module: {'%s': [0-1]}}\n"
SWAPPED = "swap: {enable: true, op_swap: [{op_name: '%s', layers: [0]}]}\n"
TENSOR_PARALLEL = "parallel={tp_size: 2}"
SEQUENCE_PARALLEL = "parallel={tp_size: 2, sequence_parallel: true}"


@pytest.mark.parametrize(
    ("text", "override", "where"),
    [
        (SELECT % ".*gelu" + SWAPPED % ".*mlp", "", "mlp.act_fn.gelu in layer 0"),
        (SELECT % ".*mlp" + SWAPPED % ".*up_proj", "", "mlp.up_proj.t in layer 0"),
        (SELECT % ".*q_proj" + "activation_swap: attention\n", "", "self_attn.q_proj.t in layers 0-1"),
        (SELECT % ".*q_proj" + SWAPPED % ".*addmm", "model.config.attention_bias=true", "q_proj.addmm in layer 0"),
        (
            SELECT % ".*_layernorm" + SWAPPED % ".*_to_copy",
            "model.dtype=bfloat16",
            "input_layernorm._to_copy in layer 0",
        ),
        (SELECT % ".*mlp" + SWAPPED % ".*reduce_scatter.*", SEQUENCE_PARALLEL, "mlp.reduce_scatter_tensor in layer 0"),
        (COMM % r".*\.AllReduce" + SWAPPED % ".*mlp", TENSOR_PARALLEL, "mlp.all_reduce in layer 0"),
        (COMM % ".*" + SWAPPED % ".*wait_tensor", TENSOR_PARALLEL, "self_attn.wait_tensor in layer 0"),
        (
            COMM % r".*\.all_gather" + "activation_swap: attention\n",
            SEQUENCE_PARALLEL,
            "self_attn.all_gather_into_tensor in layers 0-1",
        ),
    ],
)
def test_what_two_settings_do_to_one_op_is_found_in_the_model(
    config: Path, text: str, override: str, where: str
) -> None:
    code, told = check(config, text, *filter(None, [override]))
    (fault,) = told["faults"]
    assert (code, fault["path"].partition(".")[0]) == (2, "swap" if "op_swap" in text else "activation_swap")
    assert "is also recomputed, by recompute" in fault["problem"] and where in fault["problem"]
    with pytest.raises(ConfigError, match=re.escape(where)):
        train(load_config(config, [*filter(None, [override]), "train.output_dir=out"]), progress=False)
    assert not Path("out").exists()


def test_what_would_overlap_in_another_model_alone_is_no_fault(config: Path) -> None:
    """Only norms cast in bfloat16; in another model linears may."""
    code, told = check(config, SELECT % ".*_to_copy" + SWAPPED % "mlp", "model.dtype=bfloat16")
    assert (code, told["faults"]) == (0, [])


def test_training_refuses_it_before_anything_is_touched(config: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG + GELU)
    with pytest.raises(ConfigError) as caught:
        train(load_config(config, [f"train.output_dir={tmp_path}/run"]), progress=False)
    assert [(fault.path, fault.problem) for fault in caught.value.faults] == [("swap.op_swap[1].layers", CLASH)]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["explain"], ["plan", "-o", "plan.yaml"]])
def test_whatever_makes_a_plan_of_it_refuses_it_too(config: Path, command: list[str]) -> None:
    config.write_text(CONFIG + GELU)
    result = invoke(*command, config, "train.device=cpu")
    assert isinstance(result.exception, ConfigError)
    assert CLASH in str(result.exception)
    assert not Path("plan.yaml").exists()


def test_a_model_that_it_is_applied_to_refuses_it_in_its_first_layer(config: Path) -> None:
    config.write_text(CONFIG + GELU)
    run = load_config(config)
    model = build_model(run.model, seed=0)
    sections = {"recompute": run.recompute, "swap": run.swap}
    for plan in (run, sections):
        with apply(model, plan, memory={"min_swap_bytes": 0}), pytest.raises(ConfigError) as caught:
            model.base_model(input_ids=torch.zeros((1, 16), dtype=torch.int64), use_cache=False)
        assert "swap.op_swap '.*gelu': is also recomputed, by recompute.select_module '.*mlp'" in str(caught.value)
        assert "mlp.act_fn.gelu in layer 1" in str(caught.value)


def select(modules: str, more: str = "") -> str:
    return f"recompute:\n  mode: select\n  select_module: {{{modules}}}\n{more}"


FULL = "recompute:\n  mode: full\n  full_recompute_layer: [0-1]\n  exclude_op: %s\n"
OPS = "swap:\n  enable: true\n  op_swap:\n    - {layers: [0-1], op_name: '%s'}\n"
BIG = "memory.min_swap_bytes=1GiB"
FREES, KEEPS = "frees 0 bytes: what it matches", "keeps nothing: what it matches"

# Text, an override, the path of the warning, what stands at its place, and words of it, which are the run's words too.
IDLE: list[tuple[str, str, str, str, str]] = [
    (
        select(r"'mlp\.down_proj': [0-1]"),
        "",
        r"recompute.select_module['mlp\.down_proj']",
        "'mlp\\",
        f"{FREES} is a view",
    ),
    (select("'.*mpl': [0-1]"), "", "recompute.select_module['.*mpl']", "'.*mpl", "matches no module and no op"),
    (select("mlp: [0], input: [0]"), "", "recompute.select_module['input']", "input:", f"{FREES} is the layer's input"),
    (
        select("mlp: [0]", "  exclude_op: {mlp: [0]}\n"),
        "",
        "recompute.select_module['mlp']",
        "mlp: [0]",
        f"{FREES} is decided by a later rule",
    ),
    (FULL % "[transpose]", "", "recompute.exclude_op['transpose']", "transpose]", f"{KEEPS} is a view"),
    (FULL % "[mm, input]", "", "recompute.exclude_op['input']", "input]", f"{KEEPS} is the layer's input"),
    (FULL % "[nothing, mm]", "", "recompute.exclude_op['nothing']", "nothing,", "matches no op"),
    (FULL % "{mlp: [2-3]}", "", "recompute.exclude_op['mlp']", "mlp: [2-3]", f"{KEEPS} is not recomputed anyway"),
    (
        select("mlp: [0]", "  exclude_op: [gelu, sdpa]\n"),
        "",
        "recompute.exclude_op['sdpa']",
        "sdpa]",
        f"{KEEPS} is not recomputed anyway",
    ),
    (OPS % "TRANSPOSE", "", "swap.op_swap['TRANSPOSE']", "op_name: 'TRANS", "matches no module and no op"),
    (OPS % ".*transpose", "", "swap.op_swap['.*transpose']", "op_name: '.*trans", f"{FREES} is a view"),
    (OPS % "mlp", BIG, "swap.op_swap['mlp']", "op_name: 'mlp", f"{FREES} is below memory.min_swap_bytes"),
    (OPS % "input", BIG, "swap.op_swap['input']", "op_name: 'input", f"{FREES} is below memory.min_swap_bytes"),
    (
        "swap:\n  enable: true\n  layer_swap: [{layers: [0]}]\n",
        BIG,
        "swap.layer_swap",
        "layers: [0]",
        f"{FREES} is below",
    ),
    ("activation_swap: attention\n", BIG, "activation_swap", "activation_swap:", f"{FREES} is below"),
    ("policy: layer-swap\n", BIG, "policy", "policy:", "nothing is swapped: "),
    ("plan: mine.yaml\n", "", "plan", "plan: mine", "'mpl' in layers 0-1 matches no op"),
    (OPS % "input", "", "", "", ""),
    (OPS % "input" + select("mlp: [0]"), "", "", "", ""),
    (FULL % "[mm, MM]", "", "", "", ""),
    (select("mlp: [0]", "  full_recompute_layer: [0-1]\n"), "", "", "", ""),
    (select(r"mlp: [0-1], 'mlp\.act_fn': [0-1]"), "", "", "", ""),
    (select(r"'mlp\.act_fn': [0-1], mlp: [0-1]"), "", "", "", ""),
    (select("mlp: [0]", "  exclude_op: [gelu]\n"), "", "", "", ""),
    ("activation_swap: attention\n", "", "", "", ""),
    ("policy: selective\n", "", "", "", ""),
]


@pytest.mark.parametrize(("text", "override", "path", "at", "words"), IDLE, ids=[case[0] + case[1] for case in IDLE])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_check_and_a_run_tell_of_the_same_idle_settings(
    config: Path, text: str, override: str, path: str, at: str, words: str, strict: bool
) -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nrules: [{ops: mpl, action: swap, layers: [0-1]}]\n")
    overrides = [f"memory.strict_matching={strict}".lower(), *filter(None, [override])]
    code, told = check(config, text, *overrides)
    assert code == (0 if not path else 2 if strict else 1)
    found = told["faults" if strict else "warnings"]
    said = said_by_a_run(load_config(config, overrides), is_refused=bool(path) and strict)
    assert [fault["path"] for fault in found] == ([path] if path else [])
    assert bool(said) == bool(path)
    for fault in found:
        assert words in fault["problem"]
        assert fault["problem"].partition(" in layers 0-1")[0].replace("no module and ", "") in said
        assert config.read_text().splitlines()[fault["line"] - 1][fault["column"] - 1 :].startswith(at)


def said_by_a_run(run: RunConfig, *, is_refused: bool) -> str:
    """What a run warns of in its first step, or why it ends there."""
    model = build_model(run.model, seed=0)
    tokens = torch.zeros((run.train.micro_batch_size, run.data.sequence_length), dtype=torch.int64)
    refusal = pytest.raises(PlanError) if is_refused else nullcontext()
    with (
        warnings.catch_warnings(record=True) as caught,
        refusal as refused,
        apply(model, plan_of(run), memory=run.memory),
    ):
        warnings.simplefilter("always", NoEffectWarning)
        model.base_model(input_ids=tokens, use_cache=False)
    told = [str(each.message) for each in caught if each.category is NoEffectWarning]
    return str(refused.value) if refused is not None else "".join(told)


@pytest.mark.parametrize(
    ("memory", "path"),
    [("tier: host", "memory.tier"), ("tier: disk, disk_limit: 1KiB, min_swap_bytes: 0", "memory.disk_limit")],
)
def test_what_is_wrong_with_the_places_to_swap_to_has_its_line(config: Path, memory: str, path: str) -> None:
    config.write_text(CONFIG.replace("min_swap_bytes: 0", memory) + "activation_swap: attention\n")
    result = invoke("check", config, "--json")
    (fault,) = [each for each in json.loads(result.stdout)["faults"] if each["path"].startswith("memory")]
    assert (result.exit_code, fault["path"], fault["line"]) == (2, path, 3)
    assert config.read_text().splitlines()[2][fault["column"] - 1 :].startswith(path.partition(".")[2])


GATE = "recompute: {mode: select, select_module: {'mlp\\.gate_proj': [0-3]}}\n"
MIXTURE = CONFIG.replace("qwen3-tiny", "qwen3-moe-tiny").replace("{hidden_act", "{mlp_only_layers: [2], hidden_act")


def test_of_a_pipeline_each_rank_is_judged_by_its_own_layers(config: Path) -> None:
    """Only the third layer has an MLP: a rank that has the first two matches nothing, and says so in a run."""
    config.write_text(MIXTURE + GATE)
    assert invoke("check", config).exit_code == 0
    stages = "parallel={pp_size: 2, pp_microbatches: 2}"
    untied = ("model.config.tie_word_embeddings=false", "model.config.router_aux_loss_coef=0.0")
    result = invoke("check", config, stages, *untied, "train.micro_batch_size=2", "--json")
    (warning,) = json.loads(result.stdout)["warnings"]
    assert (result.exit_code, warning["problem"]) == (1, "matches no op on the rank with layers 0-1")


def test_communication_is_not_missed_where_it_comes_with_the_ranks(config: Path) -> None:
    again = r"recompute_comm: {enable: true, select_module: {'.*\.all_gather': [0-3]}}"
    assert check(config, again)[0] == 1
    assert check(config, again, SEQUENCE_PARALLEL)[0] == 0
    assert check(config, again.replace("gather", "gathre"), SEQUENCE_PARALLEL)[0] == 1


@pytest.mark.parametrize(
    ("layout", "pattern", "words"),
    [
        (SEQUENCE_PARALLEL, "all_gather", "matches no"),  # no such op in the layer itself
        (SEQUENCE_PARALLEL, ".*all_to_all", "matches no"),  # a dense model has none
        (TENSOR_PARALLEL, r".*\.all_gather", "matches no"),  # without sequence_parallel there is all_reduce alone
        (TENSOR_PARALLEL, r".*\.all_reduce", "is not saved"),
        (SEQUENCE_PARALLEL, ".*wait_tensor", "is a view"),
    ],
)
def test_communication_that_is_not_recomputed_on_many_ranks_is_told(
    config: Path, layout: str, pattern: str, words: str
) -> None:
    text = f"recompute_comm: {{enable: true, select_module: {{'{pattern}': [0-3]}}}}\n"
    code, told = check(config, text, layout)
    (warning,) = told["warnings"]
    assert code == 1
    assert words in warning["problem"]
    assert check(config, text, layout, "memory.strict_matching=true")[0] == 2


def test_an_excluded_collective_is_not_mixed_up_with_the_wait_for_another(config: Path) -> None:
    code, told = check(config, FULL % "[AllToAll, AllReduce]", TENSOR_PARALLEL)
    assert code == 1
    assert told["warnings"][0]["path"] == "recompute.exclude_op['AllToAll']"


def test_each_of_two_entries_with_one_pattern_is_told_of_in_its_place(config: Path) -> None:
    entries = "  - {op_name: mpl, layers: [2]}\n  - {op_name: mpl, layers: [0]}\n"
    code, told = check(config, f"swap:\n  enable: true\n  op_swap:\n{entries}")
    assert code == 1
    assert [(each["line"], each["problem"]) for each in told["warnings"]] == [
        (8, "matches no module and no op in layer 2"),
        (9, "matches no module and no op in layer 0"),
    ]


def test_each_of_two_entries_with_one_pattern_overlaps_in_its_place(config: Path) -> None:
    entries = "  - {op_name: '.*gelu', layers: [2]}\n  - {op_name: '.*gelu', layers: [0]}\n"
    code, told = check(config, f"swap:\n  enable: true\n  op_swap:\n{entries}" + SELECT % ".*mlp")
    assert code == 2
    assert [(each["line"], each["problem"]) for each in told["faults"]] == [
        (9, "is also recomputed, by recompute.select_module '.*mlp': mlp.act_fn.gelu in layer 0"),
    ]


@pytest.mark.parametrize(
    ("other", "field"),
    [("data.sequence_length=24", "inputs: plan 0: "), ("train.autocast=bfloat16", "autocast: plan off, here bfloat16")],
)
def test_a_plan_for_other_inputs_is_refused_as_a_run_refuses_it(config: Path, other: str, field: str) -> None:
    config.write_text(CONFIG + "policy: selective\n")
    assert invoke("plan", config, "-o", "mine.yaml").exit_code == 0
    assert check(config, "plan: mine.yaml\n")[0] == 0
    code, told = check(config, "plan: mine.yaml\n", other)
    (fault,) = told["faults"]
    assert (code, fault["path"], fault["line"]) == (2, "plan", 5)
    assert "was made for other inputs" in fault["problem"]
    assert field in fault["problem"]


def test_a_pattern_without_a_match_is_told_once(config: Path) -> None:
    _, told = check(config, select("'.*mpl': [0-1], mlp: [2]"))
    assert [warning["problem"] for warning in told["warnings"]] == ["matches no module and no op in layers 0-1"]


def test_a_pattern_that_is_slow_on_a_path_of_this_model_alone_is_a_fault(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are known before there is a model none is slow, or the text itself would have the fault."""
    monkeypatch.setattr(patterns, "KNOWN_PATHS", ())
    code, told = check(config, select("'([!-~]|[!-~])+[^!-~]': [0]"))
    (fault,) = told["faults"]
    assert (code, fault["path"], fault["line"]) == (2, "recompute.mode", 6)
    assert "takes over 0.25 s on '" in fault["problem"]
