from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from actmem.config.schema import ModelConfig, RecomputeConfig, RunConfig
from actmem.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from actmem.models.building import build_model
from actmem.training.device import choose_device
from actmem.training.metrics import EvalRecord, StartRecord, StepRecord, read_metrics
from actmem.training.run_directory import RunDirectory
from actmem.training.stopping import StopRequest
from actmem.training.trainer import TrainResult, train

MakeConfig = Callable[..., RunConfig]
SignalInStep = Callable[[signal.Signals, int], AbstractContextManager[None]]


def trained(config: RunConfig) -> TrainResult:
    return train(config, progress=False)


def state_files(config: RunConfig, step: int) -> dict[str, bytes]:
    """Parameters, optimizer and random state after `step`, byte for byte."""
    directory = RunDirectory(config.train.output_dir).checkpoints / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def steps_of(result: TrainResult) -> list[StepRecord]:
    return [record for record in read_metrics(result.metrics) if isinstance(record, StepRecord)]


def numbers_of(result: TrainResult) -> list[tuple[int, float, float | None, float]]:
    """What a run's steps came to, without how long they took."""
    return [(r.step, r.loss, r.router_loss, r.grad_norm) for r in steps_of(result)]


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_training_learns(make_config: MakeConfig, family: str) -> None:
    result = trained(make_config(family, steps=30, eval_every=15, micro_batch_size=4))
    records = read_metrics(result.metrics)
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    evals = [record.eval_loss for record in records if isinstance(record, EvalRecord)]
    assert losses[0] == pytest.approx(math.log(400), abs=0.3)
    assert losses[-1] < losses[0] - 0.8
    assert evals[1] < evals[0]
    assert result.eval_loss == evals[1]
    assert isinstance(records[0], StartRecord)
    assert (steps_of(result)[0].router_loss is not None) == (family == "moe")


def test_the_trained_model_is_a_hugging_face_directory(make_config: MakeConfig) -> None:
    result = trained(make_config(steps=2, checkpoint_every=2))
    assert result.model_dir is not None
    model = build_model(ModelConfig(path=result.model_dir), seed=0)
    assert result.checkpoint is not None
    for name, tensor in load_file(result.checkpoint / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), tensor)
    assert (result.model_dir / "tokenizer.json").is_file()
    assert len({each.stat().st_mode for each in result.model_dir.iterdir()}) == 1, "all may read what one may"
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(result.model_dir).eos_token_id


def test_the_same_run_twice_gives_the_same_bytes(make_config: MakeConfig) -> None:
    first, second = (make_config(out=out, steps=3, checkpoint_every=3) for out in ("a", "b"))
    assert numbers_of(trained(first)) == numbers_of(trained(second))
    assert state_files(first, 3) == state_files(second, 3)


# Killed by itself in the middle of the fifth forward pass, two steps after the checkpoint.
_KILLED_RUN = """
import signal, sys
from pathlib import Path
import torch
from actmem.config.schema import RunConfig
sys.path.insert(0, sys.argv[2])
from conftest import send_signal_in_forward
from actmem.training.trainer import train
torch.set_num_threads(1)
with send_signal_in_forward(signal.SIGKILL, 5):
    train(RunConfig.model_validate_json(sys.argv[1], strict=False))
"""


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_a_killed_run_goes_on_to_the_same_bytes(make_config: MakeConfig, family: str) -> None:
    straight = make_config(family, out="straight", checkpoint_every=3)
    killed = make_config(family, out="killed", checkpoint_every=3)
    script = [sys.executable, "-c", _KILLED_RUN, killed.model_dump_json(), str(Path(__file__).parent)]
    child = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120)
    assert child.returncode == -signal.SIGKILL, child.stderr
    expected, resumed = trained(straight), trained(killed)
    assert resumed.resumed_from == 3
    assert state_files(straight, 6) == state_files(killed, 6)
    assert numbers_of(resumed) == numbers_of(expected)
    assert resumed.model_dir is not None
    assert expected.model_dir is not None
    name = "model.safetensors"
    assert (resumed.model_dir / name).read_bytes() == (expected.model_dir / name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_returns(
    make_config: MakeConfig, signal_in_step: SignalInStep, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    straight, stopped = make_config(out="straight", checkpoint_every=6), make_config(out="stopped", checkpoint_every=6)
    with signal_in_step(number, 2):
        result = train(stopped)
    assert (result.steps, result.stopped_by, result.model_dir) == (2, number, None)
    assert f"stopped by {number.name} after step 2" in " ".join(capfd.readouterr().err.split())
    trained(straight)
    assert trained(stopped).resumed_from == 2
    assert state_files(straight, 6) == state_files(stopped, 6)


@pytest.mark.parametrize("look", range(1, 6))
def test_a_signal_between_any_two_looks_is_saved(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    class Late(StopRequest):
        looks = 0

        @property
        def signal_number(self) -> int | None:  # type: ignore[override]
            Late.looks += 1
            return signal.SIGTERM if Late.looks > look else None

        @signal_number.setter
        def signal_number(self, number: int | None) -> None:
            pass

    monkeypatch.setattr("actmem.training.trainer.StopRequest", Late)
    config = make_config(checkpoint_every=0)
    result = train(config)
    assert result.stopped_by == signal.SIGTERM
    assert result.steps < config.train.steps
    assert result.steps == 0 or (result.checkpoint is not None and result.checkpoint.name.endswith(f"{result.steps}"))


def test_a_second_ctrl_c_stops_at_once(make_config: MakeConfig, signal_in_step: SignalInStep) -> None:
    config = make_config()
    with (
        pytest.raises(KeyboardInterrupt),
        signal_in_step(signal.SIGINT, 2),
        signal_in_step(signal.SIGINT, 2),
    ):
        trained(config)
    assert not list(RunDirectory(config.train.output_dir).checkpoints.glob("*"))


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize("policy", ["full", "selective", "torch-full"])
def test_a_run_goes_on_under_another_plan_to_the_same_bytes(
    make_config: MakeConfig, signal_in_step: SignalInStep, family: str, policy: str
) -> None:
    straight = make_config(family, out="straight", checkpoint_every=6)
    changed = make_config(family, out="changed", checkpoint_every=6)
    trained(straight)
    with signal_in_step(signal.SIGTERM, 3):
        assert trained(changed).steps == 3
    result = trained(changed.model_copy(update={"policy": policy}))
    assert result.resumed_from == 3
    assert state_files(straight, 6) == state_files(changed, 6)
    plans = [record.plan for record in read_metrics(result.metrics) if isinstance(record, StartRecord)]
    assert plans == ["none", policy]


def test_the_sections_of_a_configuration_change_no_byte(make_config: MakeConfig) -> None:
    plain, planned = make_config(out="plain", checkpoint_every=6), make_config(out="planned", checkpoint_every=6)
    trained(plain)
    select = RecomputeConfig(mode="select", select_module={".*mlp": "0-1"}, exclude_op=("mm",))
    result = trained(planned.model_copy(update={"recompute": select}))
    assert state_files(plain, 6) == state_files(planned, 6)
    plans = [record.plan for record in read_metrics(result.metrics) if isinstance(record, StartRecord)]
    assert plans == ["recompute select 0-1"]


def test_accumulated_micro_batches_equal_one_large_batch(make_config: MakeConfig) -> None:
    whole = trained(make_config(out="whole", steps=4, lr=1e-3, micro_batch_size=4, grad_accumulation=1))
    parts = trained(make_config(out="parts", steps=4, lr=1e-3, micro_batch_size=1, grad_accumulation=4))
    for one, four in zip(steps_of(whole), steps_of(parts), strict=True):
        assert four.loss == pytest.approx(one.loss, rel=1e-5)
        assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert four.num_tokens == one.num_tokens == 4 * 32


@pytest.mark.parametrize(
    "settings",
    [{"loss": "chunked"}, {"loss": "chunked", "policy": "selective"}, {"autocast": "bfloat16"}],
    ids=["chunked", "chunked and planned", "autocast"],
)
def test_other_arithmetic_takes_nearly_the_same_course(make_config: MakeConfig, settings: dict[str, object]) -> None:
    reference = trained(make_config(out="reference", steps=5, lr=1e-3))
    other = trained(make_config(out="other", steps=5, lr=1e-3, **settings))
    for expected, found in zip(steps_of(reference), steps_of(other), strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=2e-2 if "autocast" in settings else 1e-4)
    assert numbers_of(reference) != numbers_of(other)


def test_a_finished_run_takes_no_further_step(make_config: MakeConfig) -> None:
    config = make_config(steps=2, checkpoint_every=1)
    trained(config)
    again = trained(config)
    assert (again.steps, again.resumed_from, again.loss) == (2, 2, None)
    assert len(steps_of(again)) == 2


def test_more_steps_go_on_where_it_ended(make_config: MakeConfig) -> None:
    trained(make_config(steps=2, checkpoint_every=1))
    result = trained(make_config(steps=4, checkpoint_every=1))
    assert result.resumed_from == 2
    assert [record.step for record in steps_of(result)] == [1, 2, 3, 4]


def test_resuming_switched_off_does_not_write_over_an_earlier_run(make_config: MakeConfig) -> None:
    trained(make_config(steps=1, checkpoint_every=1))
    with pytest.raises(CheckpointError, match=r"train\.resume is false, yet .* up to step-00000001"):
        trained(make_config(steps=1, resume=False))


def test_resuming_with_other_data_is_refused(make_config: MakeConfig) -> None:
    config = make_config(steps=1, checkpoint_every=1)
    trained(config)
    other = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": 16})})
    with pytest.raises(CheckpointError, match="other data"):
        trained(other)


def test_two_runs_in_one_directory_are_refused(make_config: MakeConfig) -> None:
    config = make_config()
    with (
        RunDirectory(config.train.output_dir).locked(),
        pytest.raises(CheckpointError, match=f"another run, process {os.getpid()} on .+, is writing to"),
    ):
        trained(config)


@pytest.mark.parametrize("place", ["output_dir", "cache_dir"])
def test_a_place_that_cannot_be_written(make_config: MakeConfig, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    config = make_config(out="file/run" if place == "output_dir" else "run")
    if place == "cache_dir":
        data = config.data.model_copy(update={"cache_dir": tmp_path / "file" / "cache"})
        config = config.model_copy(update={"data": data})
    with pytest.raises(CheckpointError if place == "output_dir" else DataError, match=rf"{place} .* cannot be"):
        trained(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_optimizer_have_the_dtype(make_config: MakeConfig, dtype: str) -> None:
    config = make_config(steps=2, checkpoint_every=2)
    result = trained(config.model_copy(update={"model": ModelConfig(config=config.model.config, dtype=dtype)}))
    assert result.checkpoint is not None
    tensors = load_file(result.checkpoint / "model.safetensors") | {
        name: tensor
        for name, tensor in load_file(result.checkpoint / "optimizer.safetensors").items()
        if not name.endswith("/step")
    }
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}


def test_a_loss_that_is_not_finite_names_its_step_and_takes_none(make_config: MakeConfig) -> None:
    config = make_config(lr=1e30, grad_clip=None, checkpoint_every=1, weight_decay=0.0)
    with pytest.raises(NonFiniteError, match=r"of step [23] is (nan|inf)") as caught:
        trained(config)
    assert isinstance(caught.value, FloatingPointError)
    assert list(RunDirectory(config.train.output_dir).checkpoints.iterdir())


def test_trainable_parameters_without_gradient_are_named(make_config: MakeConfig) -> None:
    def cut(module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        return output.detach() if type(module).__name__ == "Qwen3MLP" else None

    handle = nn.modules.module.register_module_forward_hook(cut)
    try:
        with pytest.warns(
            UserWarning, match=r"8 trainable parameters got no gradient.*layers\.0\.mlp\.gate_proj"
        ) as seen:
            trained(make_config(steps=2))
    finally:
        handle.remove()
    assert len(seen) == 1


def test_a_corpus_too_short_to_hold_out_from(make_config: MakeConfig) -> None:
    config = make_config(eval_every=1)
    data = config.data.model_copy(update={"eval_share": 1e-9})
    with pytest.raises(DataError, match="the held-out text has 0 tokens, and one sequence needs 33"):
        trained(config.model_copy(update={"data": data}))


def test_a_tokenizer_larger_than_the_models_vocabulary(make_config: MakeConfig) -> None:
    config = make_config()
    fields = (config.model.config or {}) | {"vocab_size": 300}
    with pytest.raises(ValueError, match="vocabulary of 300 is smaller than the tokenizer's 400"):
        trained(config.model_copy(update={"model": ModelConfig(config=fields)}))


def test_devices_that_are_not_there() -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match=r"train\.device: names no device"):
        choose_device("gpu0")
    if not torch.accelerator.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(
            ConfigError, match=r"train\.device: is not there; allowed: auto, cpu; there is no accelerator"
        ):
            choose_device("cuda")


def test_outside_the_main_thread(make_config: MakeConfig) -> None:
    results: list[TrainResult] = []
    thread = threading.Thread(target=lambda: results.append(trained(make_config(steps=1))))
    thread.start()
    thread.join()
    assert results[0].steps == 1


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_a_budget_changes_no_number_and_outlives_a_stop(
    make_config: MakeConfig, signal_in_step: SignalInStep, family: str
) -> None:
    unplanned = trained(make_config(family, out="unplanned", steps=4))
    config = make_config(family, out="budget", steps=4).model_copy(update={"memory_budget": 0.9})
    with signal_in_step(signal.SIGTERM, 4):  # the trace of the step runs the model twice
        trained(config)
    resumed = trained(config)
    assert resumed.resumed_from == 2
    plans = [each.plan for each in read_metrics(resumed.metrics) if isinstance(each, StartRecord)]
    assert plans == ["auto@90%", "auto@90%"]
    assert numbers_of(resumed) == numbers_of(unplanned)


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_another_platform_is_refused_before_anything_is_touched(make_config: MakeConfig, budget: str | None) -> None:
    config = make_config().model_copy(update={"platform": "mindspore", "memory_budget": budget})
    with pytest.raises(NotImplementedError, match="mindspore"):
        trained(config)
    assert not config.train.output_dir.exists()
