"""Cases of the configuration that come out wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actmem.cli import main
from actmem.config.loading import parse_sections
from actmem.errors import ConfigError, PlanError
from actmem.planning import Plan

REPOSITORY = Path(__file__).parents[2]
HEAD = """model: {name: qwen3-tiny}
data: {path: [x.txt], sequence_length: 64}
memory: {min_swap_bytes: 0}
"""
TENSOR_PARALLEL = "parallel: {tp_size: 2}\n"
SEQUENCE_PARALLEL = "parallel: {tp_size: 2, sequence_parallel: true}\n"


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found(text: str, *overrides: str) -> tuple[int, dict[str, Any]]:
    Path("run.yaml").write_text(text)
    result = CliRunner().invoke(main.app, ["check", "run.yaml", *overrides, "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


# In Python a section that is misspelt hides the faults of all others.
def test_an_unknown_section_hides_no_other_fault() -> None:
    sections = {"recompute": {"mode": "fulll"}, "swap": {"enable": True, "layer_swap": [{"layers": [9]}]}, "swaps": {}}
    with pytest.raises(ConfigError) as raised:
        parse_sections(sections, 4)
    assert {fault.path for fault in raised.value.faults} >= {"swaps", "recompute.mode", "swap.layer_swap[0].layers[0]"}


# Aliases of aliases: 300 bytes of YAML become 5 MB of JSON, and ten times as many with each line more.
def test_a_short_text_gives_no_endless_answer() -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in zip("abcd", "bcde", strict=True)]
    Path("run.yaml").write_text(HEAD + "\n".join(lines) + "\nactivation_swap: *e\n")
    result = CliRunner().invoke(main.app, ["check", "run.yaml", "--json"])
    assert result.exit_code == 2
    assert len(result.stdout) < 1_000_000


# The same in a plan file, whose message holds the whole of it.
@pytest.mark.parametrize("tail", ["name: *e", "rules: {x: *e}", "rules: [{ops: a, action: *e}]"])
def test_a_short_plan_gives_no_endless_message(tail: str) -> None:
    lines = ["actmem_plan: 1", "a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in zip("abcd", "bcde", strict=True)]
    Path("mine.yaml").write_text("\n".join([*lines, tail]))
    with pytest.raises(PlanError) as raised:
        Plan.load("mine.yaml")
    assert len(str(raised.value)) < 10_000


# A rule of a plan file that speaks of no layer does nothing, and nobody says so.
def test_a_rule_for_no_layer_is_told() -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nrules: [{layers: [], ops: '.*', action: recompute}]\n")
    assert found(HEAD + "plan: mine.yaml\n")[0] > 0


# A key that is no text hides the faults of its layers, and another fault says that there is no select_module.
def test_a_key_that_is_a_number_neither_hides_nor_adds_faults() -> None:
    code, told = found(HEAD + "recompute: {mode: select, select_module: {1: [99]}}\n")
    assert code == 2
    assert not [each for each in told["faults"] if each["path"] == "recompute.mode"]
    assert any("beyond the last layer" in each["problem"] for each in told["faults"])


# The default, written out in a section that is off, is refused for a model of one layer.
def test_the_default_prefetch_may_be_written_out_while_swap_is_off() -> None:
    text = HEAD + "recompute: {mode: full, full_recompute_layer: [0]}\nswap: {enable: false, default_prefetch: 1}\n"
    code, told = found(text, "model.config={num_hidden_layers: 1}")
    assert (code < 2, told["faults"]) == (True, [])


# A next-line character in a name, pattern or label does not come back from a plan file.
def test_a_plan_comes_back_from_its_file_as_it_was() -> None:
    plan = Plan("a\x85b")
    plan.save("mine.yaml")
    assert Plan.load("mine.yaml") == plan
