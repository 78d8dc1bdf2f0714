"""The reference measurements: `python -m benchmarks.run` for all of them, `--setting NAME` for one.

Each writes its table as text and its figures as JSON into benchmarks/results, with the machine and the command.
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from actmem.cli.progress import progress
from actmem.config.loading import parse_sections
from actmem.config.schema import Dtype, ModelConfig
from actmem.measuring.bench import num_steps, random_batch, run_bench
from actmem.measuring.result import BenchResult
from actmem.models.building import build_model
from actmem.planning import Plan
from actmem.planning.sections import plan_of_sections
from actmem.reporting.tables import bench_notes, bench_table, swap_table
from benchmarks.machine import Machine
from benchmarks.overhead import Overhead, measure_overhead

RESULTS = Path(__file__).parent / "results"
POLICIES = ("none", "selective", "mlp", "full", "torch-sac", "torch-full")
_PLANS = "configs/plans"
SWAP_POLICIES = (
    "none",
    "full",
    "attention-swap",
    "layer-swap",
    f"{_PLANS}/attention_mlp_swap.yaml",
    f"{_PLANS}/full_inputs_swapped.yaml",
    f"{_PLANS}/mixed.yaml",
)
_WIDTH = 130
_NUM_LAYERS = 6


def levels() -> tuple[str | Plan, ...]:
    """Three levels of advice for memory that is short, from the least to the most, on six layers.

    Half of the layers whole would hold as much as the feed-forward parts of all leave, so the second takes two thirds.
    """
    sections: dict[str, dict[str, object]] = {
        "level 1: mlp": {"recompute": {"mode": "select", "select_module": {".*mlp": ["0-5"]}}},
        "level 2: layers 0-3": {"recompute": {"mode": "full", "full_recompute_layer": ["0-3"]}},
        "level 3: swap 3-4": {
            "recompute": {"mode": "full", "full_recompute_layer": ["0-2", 5]},
            "swap": {"enable": True, "layer_swap": [{"layers": ["3-4"]}]},
        },
        "level 3: all layers": {"recompute": {"mode": "full", "full_recompute_layer": ["0-5"]}},
    }
    configs = {name: parse_sections(each, _NUM_LAYERS) for name, each in sections.items()}
    return ("none", *(replace(plan_of_sections(config), name=name) for name, config in configs.items()))


@dataclass(frozen=True)
class Setting:
    """One measurement: a fresh model and one sequence of random tokens. With `overhead`, the cost of the engine too."""

    name: str
    title: str
    model: ModelConfig
    sequence_length: int
    policies: tuple[str | Plan, ...] = POLICIES
    overhead: bool = False

    @property
    def command(self) -> str:
        """What runs it again."""
        return f"python -m benchmarks.run --setting {self.name}"


def dense(hidden: int, layers: int, *, dtype: Dtype = "float32") -> ModelConfig:
    """A Qwen3 whose other sizes follow from its hidden size, heads being 64 wide."""
    return ModelConfig(config={"model_type": "qwen3", **_shape(hidden, layers)}, dtype=dtype)


def moe(hidden: int, layers: int) -> ModelConfig:
    """A Qwen3-MoE of 8 experts, 2 of which see each token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden * 3 // 4}
    return ModelConfig(config={"model_type": "qwen3_moe", **_shape(hidden, layers), **experts})


def _shape(hidden: int, layers: int) -> dict[str, object]:
    heads = hidden // 64
    return {
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
    }


_DENSE = "dense, hidden 1024, 6 layers, 1024 tokens, float32"
_MOE = "MoE of 8 experts, hidden 1024, 6 layers, 1024 tokens, float32"
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("dense", _DENSE, dense(1024, 6), 1024),
        Setting("bf16", "dense, hidden 512, 6 layers, 2048 tokens, bfloat16", dense(512, 6, dtype="bfloat16"), 2048),
        Setting("moe", _MOE, moe(1024, 6), 1024),
        Setting("swap", _DENSE, dense(1024, 6), 1024, SWAP_POLICIES),
        Setting(
            "swap-moe",
            "MoE of 8 experts, hidden 1024, 6 layers, 1024 tokens, float32",
            moe(1024, 6),
            1024,
            SWAP_POLICIES,
        ),
        Setting("levels", _DENSE, dense(1024, _NUM_LAYERS), 1024, levels()),
        Setting("overhead", "dense, hidden 256, 8 layers, 256 tokens, float32", dense(256, 8), 256, overhead=True),
    )
}


def measure(setting: Setting, rounds: int, directory: Path) -> str:
    """Run one setting and write its two files; returns the text."""
    machine = Machine.here_and_now()
    model = build_model(setting.model, seed=0)
    batch = random_batch(model, 1, setting.sequence_length)
    with progress("bench", num_steps(setting.policies, rounds)) as on_step:
        result = run_bench(model, batch, setting.policies, setting=setting.title, rounds=rounds, on_step=on_step)
    overhead = measure_overhead(model, batch, 4 * rounds) if setting.overhead else None
    text = _text(setting, machine, model, result, overhead)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{setting.name}.txt").write_text(text, encoding="utf-8")
    data = {"command": setting.command, "machine": asdict(machine), "result": result.to_dict()}
    if overhead is not None:
        data["overhead"] = asdict(overhead)
    (directory / f"{setting.name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return text


def _text(
    setting: Setting, machine: Machine, model: PreTrainedModel, result: BenchResult, overhead: Overhead | None
) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, markup=False, highlight=False)
    console.print(f"{setting.title}; {model.num_parameters() / 1e6:.1f}M parameters, gradients standing")
    console.print(f"{machine}; {machine.date}")
    console.print(f"$ {setting.command}")
    console.print(bench_table(result))
    if any(each.swap is not None for each in result.policies):
        console.print(swap_table(result))
    for line in [*bench_notes(result), *(overhead.lines() if overhead is not None else ())]:
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def main() -> None:
    """Run the settings that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--setting", action="append", choices=SETTINGS, help="only this one; may be given several times"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each policy (default: 7)")
    arguments = parser.parse_args()
    for name in arguments.setting or SETTINGS:
        print(measure(SETTINGS[name], arguments.rounds, RESULTS), flush=True)


if __name__ == "__main__":
    main()
