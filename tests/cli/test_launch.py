"""`actmem train --nproc`: processes that are killed end the others with their name, and the run goes on afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from actmem.training.metrics import StepRecord, read_metrics

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
TEXT = REPOSITORY / "actmem" / "runtime"
STEPS = 8
SETTINGS = {
    "model": {
        "config": {
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": False,
        }
    },
    "data": {"path": [f"{TEXT}/*.py"], "sequence_length": 32, "vocab_size": 512},
    "train": {"steps": STEPS, "micro_batch_size": 4, "warmup_steps": 1, "checkpoint_every": 2, "device": "cpu"},
    "policy": "attention-swap",
    "memory": {"min_swap_bytes": 0},
    "parallel": {"pp_size": 2, "pp_microbatches": 4, "timeout_seconds": 60.0},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("launch")
    cache = {"data": SETTINGS["data"] | {"cache_dir": str(root / "cache")}}  # type: ignore[operator]
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | cache))
    return path


def start(config: Path, output: Path, *overrides: str, num_processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "actmem", "train", str(config), "--nproc", str(num_processes), "--no-progress"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, f"train.output_dir={output}", *overrides],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The processes that were started, the first rank first."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return sorted(map(int, children))


def losses(output: Path) -> dict[int, float]:
    metrics = output / "metrics.jsonl"
    if not metrics.exists():
        return {}
    return {each.step: each.loss for each in read_metrics(metrics) if isinstance(each, StepRecord)}


def wait_for_step(output: Path, step: int, run: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 90
    while step not in losses(output):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end, f"step {step} did not come"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> dict[int, float]:
    output = config.parent / "undisturbed"
    run = start(config, output)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    return losses(output)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(
    config: Path, undisturbed: dict[int, float], rank: int
) -> None:
    output = config.parent / f"killed-{rank}"
    run = start(config, output)
    wait_for_step(output, random.Random(rank).randint(2, 5), run)
    os.kill(ranks_of(run)[rank], signal.SIGKILL)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL, said
    assert f"rank {rank} ended first, by SIGKILL" in said
    again = start(config, output)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert losses(output) == undisturbed


def test_a_signal_to_all_saves_and_stops(config: Path, undisturbed: dict[int, float]) -> None:
    output = config.parent / "stopped"
    run = start(config, output)
    wait_for_step(output, 3, run)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    done = max(losses(output))
    assert done < STEPS, said
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    assert (output / "checkpoints" / f"step-{done:08d}").is_dir(), said
    again = start(config, output)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert losses(output) == undisturbed


@pytest.mark.parametrize(
    ("name", "num_processes"), [("fsdp2_tp2", 4), ("moe_ep2", 2), ("pp2_1f1b_swap", 2), ("pp2_interleaved", 2)]
)
def test_the_layouts_that_come_with_it_run(config: Path, name: str, num_processes: int, tmp_path: Path) -> None:
    file = REPOSITORY / "configs" / f"{name}.yaml"
    few = ("train.steps=2", "train.checkpoint_every=0", "data.sequence_length=64", "train.warmup_steps=1")
    cache = f"data.cache_dir={config.parent / 'cache'}"
    run = start(file, tmp_path / "out", *few, cache, "data.vocab_size=512", num_processes=num_processes)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert set(losses(tmp_path / "out")) == {1, 2}
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_a_checkpoint_that_cannot_be_written_is_told_by_all_and_nobody_waits(config: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    run = start(config, tmp_path)
    said, _ = run.communicate(timeout=50)  # less than the ranks would wait for each other
    assert run.returncode == 2, said
    assert "the checkpoint of step 2 cannot be written" in " ".join(said.split())


def test_what_all_ranks_would_say_is_said_once(config: Path, tmp_path: Path) -> None:
    run = start(config, tmp_path / "out", "data.path=[nothing-here.txt]")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2, said
    assert said.count("'nothing-here.txt' matches no file") == 1
    assert "exitcode" not in said and "Traceback" not in said


def test_another_number_of_processes_is_told_before_any_is_started(config: Path, tmp_path: Path) -> None:
    run = start(config, tmp_path, "parallel.pp_size=1")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "is for 1 processes, and 2 run" in " ".join(said.split())
    assert not any(tmp_path.iterdir())
