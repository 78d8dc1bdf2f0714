"""Train two small models with less memory, then measure what each policy costs and saves.

Run it with `make demo`. It takes a few minutes on two cores, needs no network and no data: the models learn the Python
standard library of this machine. Everything it writes is in runs/demo.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from transformers.utils import logging

from actmem.cli.bench import model_and_batch, show_result, write_result
from actmem.cli.calibrate import calibrated
from actmem.cli.pareto import show_frontier, write_frontier
from actmem.cli.progress import progress
from actmem.cli.screen import Screen
from actmem.config.schema import DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from actmem.hardware import save_hardware
from actmem.measuring.bench import num_steps, random_batch, run_bench
from actmem.models.building import build_model
from actmem.planning.frontier import along, frontier
from actmem.reporting.plots import plot_losses
from actmem.training.budget import planner_of
from actmem.training.device import device_at_hand
from actmem.training.metrics import StepRecord, read_metrics
from actmem.training.traced import trace_step
from actmem.training.trainer import train

OUT = Path("runs/demo")
PRESETS = ("qwen3-tiny", "qwen3-moe-tiny")
POLICIES = (
    "none",
    "selective",
    "mlp",
    "full",
    "attention-swap",
    "configs/plans/mixed.yaml",
    "torch-sac",
    "torch-full",
)
YARDSTICKS = ("full",)
ROUNDS = 2
NUM_BUDGETS = 7
SEQUENCE_LENGTH = 512
# Large enough that activations outweigh all else, small enough for a laptop.
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
TITLES = {"dense": "Qwen3", "moe": "Qwen3-MoE"}
MEASURED = {
    "dense": SHAPE | {"model_type": "qwen3"},
    "moe": SHAPE | EXPERTS | {"model_type": "qwen3_moe"},
}


def main() -> None:
    """Train, measure, and say where the results are."""
    logging.disable_progress_bar()
    screen = Screen()
    screen.line("1. Training under the policy 'selective', on Python's standard library", style="bold")
    losses = {preset: train_preset(preset) for preset in PRESETS}
    for preset, series in losses.items():
        screen.line(f"   {preset}: loss {series[0]:.2f} in step 1, {series[-1]:.2f} in step {len(series)}")
    plot_losses(losses, OUT / "losses.png", OUT / "losses.svg")

    screen.line("\n2. All policies side by side, with fresh models and random tokens", style="bold")
    for name, fields in MEASURED.items():
        measure(screen, name, fields)

    screen.line("3. A budget in, a plan out: the frontier of the dense model, predicted and measured", style="bold")
    measure_frontier(screen)

    screen.line(f"Results are in {OUT}:", style="bold")
    screen.facts(
        {
            "losses.png": "training loss",
            "dense/bench.png": "peak memory and step time, dense model",
            "moe/bench.png": "the same, mixture of experts",
            "frontier.html": "what memory costs in time: the planner's frontier, predicted and measured",
            "*.svg, *.json": "the same plots to edit, the numbers behind them",
            "*/model": "the trained models, to load with Hugging Face",
        }
    )


def train_preset(preset: str) -> list[float]:
    """Train one preset for a few dozen steps; returns the loss of each."""
    config = RunConfig(
        model=ModelConfig(name=preset),
        data=DataConfig(path=corpus(), sequence_length=256, cache_dir=OUT / "cache"),
        train=TrainConfig(steps=36, micro_batch_size=8, lr=3e-3, warmup_steps=6, output_dir=OUT / preset),
        policy="selective",
    )
    result = train(config)
    return [record.loss for record in read_metrics(result.metrics) if isinstance(record, StepRecord)]


def corpus() -> list[str]:
    """Python's own sources and the text of its manual pages, as far as this installation has them."""
    library = Path(sysconfig.get_path("stdlib"))
    patterns = [library / "*.py", library / "pydoc_data" / "topics.py"]
    return [str(pattern) for pattern in patterns if any(pattern.parent.glob(pattern.name))]


def measure(screen: Screen, name: str, fields: dict[str, object]) -> None:
    """Measure all policies on one model and show the table."""
    model = build_model(ModelConfig(config=fields), seed=0)
    batch = random_batch(model, 1, SEQUENCE_LENGTH)
    shape = f"hidden {model.config.hidden_size}, {model.config.num_hidden_layers} layers, {SEQUENCE_LENGTH} tokens"
    with progress("bench", num_steps(POLICIES, ROUNDS)) as on_step:
        result = run_bench(
            model, batch, POLICIES, setting=f"{TITLES[name]}, {shape}, fp32 on CPU", rounds=ROUNDS, on_step=on_step
        )
    write_result(result, OUT / name)
    show_result(screen, result)
    screen.line("")


def measure_frontier(screen: Screen) -> None:
    """Time the ops of the dense model, find plans for budgets from the least to that of no plan, and measure them."""
    run = RunConfig(
        model=ModelConfig(config=MEASURED["dense"]),
        data=DataConfig(path=corpus(), sequence_length=SEQUENCE_LENGTH),
        train=TrainConfig(micro_batch_size=1, device="cpu"),
        memory=MemoryConfig(min_swap_bytes=2**18),
        hardware=str(OUT / "hardware.yaml"),
    )
    hardware = calibrated(run)
    save_hardware(hardware, OUT / "hardware.yaml")
    planner = planner_of(run, trace_step(run, kernels_on=device_at_hand(run)), gradients_stand=True)
    steps = list(along(planner, NUM_BUDGETS, seconds=2.0))
    predicted = frontier(planner, hardware, setting=f"Qwen3, {SEQUENCE_LENGTH} tokens", steps=steps)
    contenders = [*YARDSTICKS, *(step.planned.plan for step in steps)]
    model, batch = model_and_batch(run)
    with progress("frontier", num_steps(contenders, ROUNDS)) as on_step:
        result = run_bench(model, batch, contenders, rounds=ROUNDS, memory=run.memory, on_step=on_step)
    found = predicted.with_measured(result.totals(planner.standing_bytes))
    write_frontier(found, run, hardware, OUT)
    show_frontier(screen, found)
    screen.line("")


if __name__ == "__main__":
    main()
