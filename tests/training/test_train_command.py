from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from actmem.cli.train import train
from actmem.config.schema import DataConfig

CONFIG = """
model:
  config: {{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
            num_key_value_heads: 2, head_dim: 16}}
data: {{path: {paths}, sequence_length: 32, vocab_size: 400, eval_share: 0.2, cache_dir: "{cache}"}}
train: {{steps: 3, eval_every: 3, device: cpu, output_dir: "{out}"}}
policy: full
"""


@pytest.fixture
def config(data: DataConfig, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(paths=json.dumps(data.path), cache=data.cache_dir, out=tmp_path / "run"))
    return path


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(train)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_it_trains_and_says_what_came_out(config: Path, tmp_path: Path) -> None:
    result = run(config, "train.steps=2", "--no-progress")
    assert result.exit_code == 0, result.output
    assert "steps" in result.stdout
    assert "resident set high-water mark" in result.stdout
    assert str(tmp_path / "run" / "metrics.jsonl") in "".join(result.stdout.split())  # however it was folded
    assert result.stderr == ""


def test_json_alone_is_on_standard_output_beside_the_progress(config: Path) -> None:
    result = run(config, "--json")
    fields = json.loads(result.stdout)
    assert (fields["steps"], fields["stopped_by"]) == (3, None)
    assert fields["loss"] > 0
    assert fields["eval_loss"] > 0
    assert "step 3/3" in result.stderr
    assert "held-out loss" in result.stderr


def test_a_run_that_a_signal_ended_has_its_exit_code(
    config: Path, signal_in_step: Callable[[signal.Signals, int], AbstractContextManager[None]]
) -> None:
    with signal_in_step(signal.SIGTERM, 2):
        result = run(config, "--json")
    assert result.exit_code == 128 + signal.SIGTERM
    assert json.loads(result.stdout)["steps"] == 2
    assert "run again to go on" in " ".join(result.stderr.split())
    again = json.loads(run(config, "--json").stdout)
    assert (again["resumed_from"], again["steps"]) == (2, 3)
