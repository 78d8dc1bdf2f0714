"""`actmem train --nproc`: processes that are killed end the others with their name, and the run goes on afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from process_groups import free_ports

from actmem.cli import main
from actmem.training.metrics import StepRecord, read_metrics
from actmem.training.run_directory import RunDirectory

pytestmark = pytest.mark.ranks

REPOSITORY = Path(__file__).parents[2]
TEXT = REPOSITORY / "actmem" / "runtime"
STEPS = 8
MOMENTS = ("backward", "checkpoint", "swap", "forward")
NUM_DOOMED = int(os.environ.get("ACTMEM_CHAOS", 2))
"""How many runs are killed, in the order of `MOMENTS`, again and again. 20 take ten minutes."""
SETTINGS: dict[str, Any] = {
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
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configuration files, by the name of their layout."""
    root = tmp_path_factory.mktemp("launch")
    cache = {"data": SETTINGS["data"] | {"cache_dir": str(root / "cache")}}
    shards = {"train": SETTINGS["train"] | {"micro_batch_size": 2}, "parallel": {"dp_shard_size": 2}}
    files = {"stages": root / "stages.yaml", "shards": root / "shards.yaml"}
    files["stages"].write_text(yaml.safe_dump(SETTINGS | cache))
    files["shards"].write_text(yaml.safe_dump(SETTINGS | cache | shards))
    return files


@pytest.fixture
def config(layouts: dict[str, Path]) -> Path:
    """Two stages."""
    return layouts["stages"]


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


def start_doomed(config: Path, output: Path, doom: str, *overrides: str) -> subprocess.Popen[str]:
    """A run in which one rank kills itself, as `doomed.py` has it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [Path(__file__).with_name("doomed.py"), "train", config, f"train.output_dir={output}", *overrides]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DOOM": doom},
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
def undisturbed(layouts: dict[str, Path]) -> Callable[[str], dict[int, float]]:
    """The losses of a run in peace, by its layout."""

    @cache
    def run(layout: str) -> dict[int, float]:
        output = layouts[layout].parent / f"undisturbed-{layout}"
        process = start(layouts[layout], output)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return losses(output)

    return run


LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes in /proc")


@LINUX
def test_a_killed_rank_is_named_and_ends_the_others(config: Path) -> None:
    output = config.parent / "killed"
    run = start(config, output)
    wait_for_step(output, 3, run)  # the checkpoint of step 2 is written by then
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL, said
    assert "rank 1 ended first, by SIGKILL" in said
    assert "run again to go on from the last checkpoint" in said


@LINUX
def test_without_a_checkpoint_a_killed_run_starts_again(config: Path) -> None:
    output = config.parent / "killed-early"
    run = start(config, output, "train.checkpoint_every=0", "train.steps=2000")
    wait_for_step(output, 1, run)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    said, _ = run.communicate(timeout=60)
    assert "rank 1 ended first, by SIGKILL" in said
    assert "there is no checkpoint yet, so a new run starts from the beginning" in said
    assert "last checkpoint" not in said


def test_ranks_save_and_stop_when_what_started_them_is_killed(config: Path) -> None:
    output = config.parent / "orphans"
    run = start(config, output, "train.steps=2000", "train.checkpoint_every=0")
    wait_for_step(output, 2, run)
    run.kill()
    run.communicate(timeout=60)  # until the ranks, which write to the same pipe, have ended
    assert (output / "checkpoints" / f"step-{max(losses(output)):08d}").is_dir()


@LINUX
def test_a_rank_that_stands_still_is_named_within_the_timeout(config: Path) -> None:
    run = start(config, config.parent / "still", "parallel.timeout_seconds=5")
    wait_for_step(config.parent / "still", 2, run)
    other, still = ranks_of(run)
    os.kill(still, signal.SIGSTOP)
    started = time.monotonic()
    assert run.stdout is not None
    said = ""
    while "run again" not in said:
        said += run.stdout.readline()
    assert time.monotonic() - started < 5 + 10
    while other in ranks_of(run):  # what started them has not noticed yet
        time.sleep(0.02)
    os.kill(still, signal.SIGKILL)  # it would give it half a minute
    said += run.communicate(timeout=60)[0]
    assert run.returncode == 2, said
    assert "rank 0 gave up in " in said
    assert "rank 1 does not answer" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("index", range(NUM_DOOMED))
def test_a_run_killed_anywhere_goes_on_to_the_same_losses(
    layouts: dict[str, Path], undisturbed: Callable[[str], dict[int, float]], index: int
) -> None:
    chance = random.Random(index)
    moment, layout = MOMENTS[index % len(MOMENTS)], chance.choice(sorted(layouts))
    often = {"forward": 20, "backward": 20, "swap": 6, "checkpoint": 3}
    delay_s = chance.uniform(0.0, 0.03) if moment == "checkpoint" else 0.0
    doom = f"{chance.randrange(2)} {moment} {chance.randint(1, often[moment])} {delay_s}"
    output = layouts[layout].parent / f"doomed-{index}"
    run = start_doomed(layouts[layout], output, doom)
    said, _ = run.communicate(timeout=120)
    assert run.returncode != 0, f"{layout}, {doom}: nobody died\n{said}"
    assert len(losses(output)) < STEPS, f"{layout}, {doom}: died after the last step"
    again = start(layouts[layout], output)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, f"{layout}, {doom}: {said}"
    assert losses(output) == undisturbed(layout), f"{layout}, {doom}"


def test_a_signal_to_all_saves_and_stops(config: Path, undisturbed: Callable[[str], dict[int, float]]) -> None:
    output = config.parent / "stopped"
    run = start(config, output)
    wait_for_step(output, 3, run)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert said.count("Stopping after this step") == 1
    done = max(losses(output))
    assert done < STEPS, said
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    assert (output / "checkpoints" / f"step-{done:08d}").is_dir(), said
    again = start(config, output)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert losses(output) == undisturbed("stages")


SWAP = ("policy=null", "activation_swap=attention", "memory.min_swap_bytes=0")


@pytest.mark.parametrize(
    ("name", "num_processes", "others"),
    [
        ("fsdp2_tp2", 4, ()),
        ("moe_ep2", 2, ()),
        ("moe_ep2", 2, SWAP),
        ("pp2_1f1b_swap", 2, ()),
        ("pp2_interleaved", 2, ()),
    ],
)
def test_the_layouts_that_come_with_it_run(
    config: Path, name: str, num_processes: int, others: tuple[str, ...], tmp_path: Path
) -> None:
    file = REPOSITORY / "configs" / f"{name}.yaml"
    few = ("train.steps=2", "train.checkpoint_every=0", "data.sequence_length=64", "train.warmup_steps=1")
    cache = f"data.cache_dir={config.parent / 'cache'}"
    run = start(file, tmp_path / "out", *few, cache, "data.vocab_size=512", *others, num_processes=num_processes)
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


def test_under_torchrun_the_first_rank_speaks_for_all(config: Path, tmp_path: Path) -> None:
    run = start_doomed(config, tmp_path / "out", "0 forward 999 0", "data.path=[nothing-here.txt]")
    said, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert said.count("'nothing-here.txt' matches no file") == 1


def test_under_torchrun_a_fault_in_the_configuration_is_told_once(config: Path, tmp_path: Path) -> None:
    run = start_doomed(config, tmp_path / "out", "0 forward 999 0", "train.stepz=3")
    said, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert said.count("is not a key of train") == 1


def test_a_process_whose_first_has_nothing_to_say_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("actmem.cli.told_once.time.sleep", slept.append)
    monkeypatch.setattr(sys, "argv", ["actmem", "train", "nothing-here.yaml"])
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit):
            main.run()
        assert "does not exist" in capsys.readouterr().err
    assert len(slept) == 1


def test_another_number_of_processes_is_told_before_any_is_started(config: Path, tmp_path: Path) -> None:
    run = start(config, tmp_path, "parallel.pp_size=1")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "is for 1 process, and 2 run" in (told := " ".join(said.split()))
    assert "parallel.dp_shard_size: 2, which shares the parameters out" in told
    assert "parallel.dp_replicate_size: 2, which copies them" in told
    assert not any(tmp_path.iterdir())


def test_a_directory_in_use_is_told_once(config: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path).locked():
        said, _ = (run := start(config, tmp_path)).communicate(timeout=60)
    assert run.returncode == 2, said
    assert " ".join(said.split()).count(f"another run, process {os.getpid()} on") == 1
    assert "came to no end" not in said


def test_machines_that_do_not_share_the_directory_are_told_before_the_first_step(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "actmem", "train", str(config), "--no-progress", "train.output_dir=run"]
    known = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    runs = []
    for rank in range(2):
        (machine := tmp_path / f"machine {rank}").mkdir()
        environment = os.environ | known | {"RANK": str(rank), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(subprocess.Popen(command, env=environment, cwd=machine, **pipes))
    first, other = (" ".join(run.communicate(timeout=120)[0].split()) for run in runs)
    assert [run.returncode for run in runs] == [2, 2], (first, other)
    assert "train.output_dir run is not the directory of rank 0 for rank 1" in first
    assert "error" not in other
    assert not any(tmp_path.glob("*/run/checkpoints"))


def test_a_signal_that_only_one_rank_gets_stops_all_at_the_same_step(config: Path, tmp_path: Path) -> None:
    run = start(config, tmp_path, "train.steps=300", "train.checkpoint_every=0")
    wait_for_step(tmp_path, 2, run)
    os.kill(ranks_of(run)[1], signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert (tmp_path / "checkpoints" / f"step-{max(losses(tmp_path)):08d}").is_dir(), said


def test_a_rank_that_is_left_alone_says_so(config: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "actmem", "train", str(config), f"train.output_dir={tmp_path / 'out'}"]
    ended = subprocess.run(
        [*command, "parallel.timeout_seconds=3"],
        env=os.environ | {name: str(value) for name, value in alone.items()},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "did not come together" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
