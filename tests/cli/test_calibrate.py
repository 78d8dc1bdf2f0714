"""`actmem calibrate`: a real run on a tiny model, and all that keeps it from writing a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner

from actmem.cli import main
from actmem.errors import ConfigError, HardwareError, MeasurementError
from actmem.hardware import CostModel, load_hardware, work_of
from actmem.measuring import calibration, op_times, rates

CONFIG = """
model:
  name: qwen3-tiny
  config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
data: {path: [nothing-is-read.txt], sequence_length: 32, vocab_size: 300}
train: {device: cpu}
"""


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SAMPLING_SECONDS", 0.005)
    monkeypatch.setattr(op_times, "_ENOUGH_SECONDS", 0.2)
    monkeypatch.setattr(calibration, "CPU_PRODUCTS", ((64, 64, 64), (128, 128, 128)))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["calibrate", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_a_profile_that_knows_every_op_of_the_model(config: Path) -> None:
    from actmem.config.loading import load_config
    from actmem.training.traced import trace_run

    code, output = run(config, "-o", "mine.yaml")
    assert code == 0
    assert "products, float32" in output and "GFLOP/s" in output and "disk, out" in output
    assert output.splitlines()[-1] == "Written: mine.yaml"
    hardware = load_hardware("mine.yaml")
    assert hardware.times == "measured" and hardware.link is None and hardware.disk is not None
    assert hardware.note is not None and "1 x 32 tokens" in hardware.note and "add up to the step" in hardware.note
    graph = trace_run(load_config(config))
    (region,) = graph.kinds.values()
    model = CostModel(hardware)
    assert all(model.is_measured(work_of(region, index)) for index in range(len(region.ops)))
    assert sorted(path.name for path in Path().iterdir()) == ["mine.yaml", "run.yaml"]


def test_without_a_configuration_no_op_has_a_time_of_its_own(config: Path) -> None:
    code, output = run("-o", "mine.yaml", "--json")
    hardware = load_hardware("mine.yaml")
    assert (code, json.loads(output)) == (0, hardware.model_dump(mode="json"))
    assert not hardware.measured_ops and hardware.measured
    assert hardware.efficiency.matmul.high <= 1.0


@pytest.mark.parametrize(
    ("out", "problem"),
    [("none/mine.yaml", "there is no folder none"), ("folder", "it is a directory")],
)
def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    out: str, problem: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("folder").mkdir()
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured"))
    with pytest.raises(HardwareError, match=problem):
        run("-o", out)


def test_faults_of_the_configuration(config: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        run("other.yaml", "-o", "mine.yaml")
    with pytest.raises(ConfigError, match="stps"):
        run(config, "train.stps=1", "-o", "mine.yaml")
    assert not Path("mine.yaml").exists()


def test_a_disk_that_cannot_be_written(config: Path) -> None:
    with pytest.raises(MeasurementError, match=r"'none' cannot be measured: No such file.*memory.disk_path"):
        calibration._measure_disk(Path("none"), torch.device("cpu"))


def test_ctrl_c_leaves_what_was_there(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    Path("mine.yaml").write_text("as before")
    monkeypatch.setattr(calibration, "memory_rates", interrupted)
    code, _ = run("-o", "mine.yaml")
    assert code == 130
    assert Path("mine.yaml").read_text() == "as before"
    assert sorted(path.name for path in Path().iterdir()) == ["mine.yaml", "run.yaml"]


def test_peaks_of_a_known_device_stand_above_what_it_reaches() -> None:
    known = load_hardware("h200")
    assert calibration._rate([7e14, 6e14], known.matmul_flops_per_second.peak).peak == 989e12
    assert calibration._rate([1.1e15], known.matmul_flops_per_second.peak).peak == 1.1e15
    copying = calibration._copying(rates.CopySpeeds(50e9, 48e9, 80e9), known.link)
    assert calibration._link_shares(copying).nominal == 0.75
