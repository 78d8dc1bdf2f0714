"""`actmem bench`: from a configuration to a table, a plot and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actmem import measuring
from actmem.cli import bench, main
from actmem.measuring import BenchResult
from actmem.measuring.agreement import Agreement
from actmem.training.traced import expected_vocab_size

CONFIG = """
model:
  name: qwen3-tiny
  config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
data: {path: [nothing-is-read.txt], sequence_length: 32, vocab_size: 300}
train: {device: cpu}
"""


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["bench", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_a_table_and_three_files(config: Path) -> None:
    code, output = run(config, "--policies", "selective, torch-full", "--rounds", 1, "--out", "measured")
    assert code == 0
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    assert lines[0] == "qwen3-tiny with changes, float32, 1 x 32 tokens, cpu"
    assert [line.split()[0] for line in lines if line.split()[-1:] == ["equal"]] == ["none", "selective", "torch-full"]
    assert lines[-1] == "Written: measured/bench.json, bench.png, bench.svg"
    assert sorted(path.name for path in Path("measured").iterdir()) == ["bench.json", "bench.png", "bench.svg"]
    assert [each.policy for each in BenchResult.load("measured/bench.json").policies] == [
        "none",
        "selective",
        "torch-full",
    ]


def test_the_own_plan_runs_beside_the_usual_policies_and_not_beside_those_that_are_named(config: Path) -> None:
    config.write_text(CONFIG + "policy: attention-swap\nmemory: {min_swap_bytes: 0}\n")

    def measured(*arguments: object) -> list[str]:
        assert run(config, "--rounds", 1, "--out", "measured", *arguments)[0] == 0
        return [each.policy for each in BenchResult.load("measured/bench.json").policies]

    assert measured("--policies", "full") == ["none", "full"]
    assert measured()[-1] == "attention-swap"


def test_json_and_overrides(config: Path) -> None:
    code, output = run(
        config, "data.sequence_length=16", "train.autocast=bfloat16", "model.loss=chunked", "--policies", "full",
        "--rounds", 2, "--json",
    )  # fmt: skip
    found = json.loads(output)
    assert (code, found["num_tokens"]) == (0, 16)
    assert found["setting"].endswith("autocast bfloat16, 1 x 16 tokens, cpu")
    assert [len(each["timing"]["seconds"]) for each in found["policies"]] == [2, 2]
    assert found == json.loads(Path("runs/actmem/bench/bench.json").read_text())


def test_a_policy_may_be_a_plan_file(config: Path) -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nrules: [{layers: all, ops: '.*', action: recompute}]\n")
    code, output = run(config, "--policies", "mine.yaml", "--rounds", 1)
    assert code == 0
    assert any(line.split()[:1] == ["mine"] for line in output.splitlines())


def test_wrong_numbers_exit_with_1(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, **settings: object) -> BenchResult:
        result = measuring.run_bench(*arguments, **settings)
        spoilt = replace(result.policies[-1], agreement=Agreement(difference=0.5, allowed=0.0))
        return replace(result, policies=(*result.policies[:-1], spoilt))

    monkeypatch.setattr("actmem.measuring.bench.run_bench", wrong)
    code, output = run(config, "--policies", "full", "--rounds", 1)
    assert code == 1
    assert "WRONG NUMBERS under full" in output and "OFF by 5.0e-01" in output


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "qwen3-tiny"}, 300),
        ({"name": "qwen3-tiny", "config": {"vocab_size": 77}}, None),
        ({"config": {"model_type": "qwen3"}}, 300),
    ],
)
def test_the_vocabulary_is_that_of_training(fields: dict[str, object], expected: int | None) -> None:
    settings = bench.RunConfig(model=fields, data={"path": ["a"], "vocab_size": 300})
    assert expected_vocab_size(settings) == expected


def test_the_plan_for_a_budget_is_measured_like_a_policy(config: Path) -> None:
    code, output = run(config, "--policies", "auto@90%", "--rounds", 1, "--json")
    none, planned = json.loads(output)["policies"]
    assert (code, planned["policy"]) == (0, "auto@90%")
    assert planned["peak_bytes"] < none["peak_bytes"]
    assert (
        planned["holdings"]["held_bytes"]
        <= 0.9 * none["holdings"]["held_bytes"] + none["holdings"]["held_bytes"] * 0.01
    )
