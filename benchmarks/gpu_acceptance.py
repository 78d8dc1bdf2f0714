"""Acceptance on one accelerator: `python -m benchmarks.gpu_acceptance`.

First the rate of copies between the device and pinned memory. Then every policy must give the gradients of the
unplanned model, on small models of both families and in several dtypes. Then up to twelve layers of Qwen3-8B and of
Qwen3-30B-A3B, as many as fit the card and the time, under all policies and torch's own ways side by side. Writes one
table and one JSON file, anew after each part.

`--device cpu` runs the same on the CPU with small shapes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from actmem.cli.progress import progress
from actmem.config.presets import PRESETS
from actmem.config.schema import DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from actmem.graph import RegionGraph
from actmem.measuring.agreement import Agreement, Reference
from actmem.measuring.bench import num_steps, random_batch, run_bench, with_own_modules
from actmem.measuring.floor import unplanned_fates
from actmem.measuring.result import BenchResult
from actmem.models.building import build_model
from actmem.reporting.tables import bench_notes, bench_table, swap_table
from actmem.runtime import apply
from actmem.runtime.yardsticks import YARDSTICKS
from actmem.training.loss import next_token_loss
from actmem.training.traced import trace_run
from benchmarks.machine import Machine

OUT = Path(__file__).parent / "results" / "gpu_acceptance"
OURS = (
    "selective",
    "mlp",
    "full",
    "attention-swap",
    "layer-swap",
    "configs/plans/mixed.yaml",
    "configs/plans/full_inputs_swapped.yaml",
)
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_FAMILIES = {
    "dense": _SMALL | {"model_type": "qwen3"},
    "moe": _SMALL | _EXPERTS | {"model_type": "qwen3_moe"},
}
_CARD_SHARE = 0.8
_MAX_LAYERS = 12  # more say nothing new, and pinned memory for them has to be made first
_SECONDS_A_STACK = 120.0


@dataclass(frozen=True)
class Check:
    """Whether one policy gave the numbers of the unplanned model."""

    case: str
    policy: str
    agreement: Agreement


@dataclass(frozen=True)
class CopyRate:
    """Bytes a second between the device and pinned memory, alone and with the other direction at once."""

    out: float
    back: float
    both: float


def check_numbers(device: torch.device) -> Iterator[Check]:
    """Every policy of ours on small models of both families, in float32, bfloat16 and autocast."""
    for family, fields in _FAMILIES.items():
        for case, dtype, autocast in (
            ("float32", "float32", False),
            ("bfloat16", "bfloat16", False),
            ("autocast", "float32", True),
        ):
            model = build_model(ModelConfig(config=fields, dtype=dtype), seed=0).to(device)
            batch = random_batch(model, 2, 128)

            def step(planned: torch.nn.Module, batch=batch, autocast=autocast) -> torch.Tensor:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                    total = next_token_loss(planned, batch, num_targets=batch.targets.numel(), kind="standard").total()
                total.backward()
                return total.detach()

            reference = Reference(model, lambda model=model, step=step: step(model))
            for policy in OURS:
                planned = with_own_modules(model)
                with apply(planned, policy, memory=MemoryConfig(min_swap_bytes=0, verify="always")):
                    for _ in range(3):
                        agreement = reference.compare(lambda planned=planned, step=step: step(planned))
                yield Check(f"{family} {case}", Path(policy).stem, agreement)


def measure_stack(preset: str, device: torch.device, *, small: bool, rounds: int) -> tuple[BenchResult, str]:
    """All policies on as many layers of `preset` as fit the card and the time."""
    length, sequences = (256, 1) if small else (4096, 2)
    fields = dict(PRESETS[preset])
    fields |= {"vocab_size": 2048, "num_hidden_layers": 2 if small else 1}
    if small:
        fields |= _FAMILIES["moe" if "num_experts" in fields else "dense"]
    else:
        fields["num_hidden_layers"] = _num_layers(fields, (sequences, length), device)
    with device:  # parameters of this size take minutes to make on a CPU
        model = build_model(ModelConfig(config=fields, dtype="bfloat16"), seed=0)
    model.to(device)
    batch = random_batch(model, sequences, length)
    policies = (*OURS, *YARDSTICKS)
    shape = f"{fields['num_hidden_layers']} layers of {preset}, {sequences} x {length} tokens, bfloat16"
    memory = MemoryConfig(min_swap_bytes=0) if small else MemoryConfig()
    with progress("bench", num_steps(policies, rounds)) as on_step:
        result = run_bench(model, batch, policies, setting=shape, rounds=rounds, memory=memory, on_step=on_step)
    return result, f"{model.num_parameters() / 1e9:.2f}B parameters"


def _num_layers(fields: dict[str, object], batch: tuple[int, int], device: torch.device) -> int:
    """Layers whose parameters, two sets of gradients and unplanned activations fit, and whose steps end in time."""
    run = RunConfig(
        model=ModelConfig(config=fields, dtype="bfloat16"),
        data=DataConfig(path=["*"], sequence_length=batch[1]),
        train=TrainConfig(micro_batch_size=batch[0]),
    )
    graph = trace_run(run)
    region = graph.of_layer(next(iter(graph.layers)))
    held = unplanned_fates(region).held_bytes
    weights = sum(region.storages[index].num_bytes for index in _parameters(region))
    free, _ = torch.cuda.mem_get_info(device)
    fitting = int(free * _CARD_SHARE / (held + 3 * weights))
    flops = 3 * sum(op.flops for op in region.ops)
    steps = (len(OURS) + len(YARDSTICKS) + 1) * 8
    in_time = int(_SECONDS_A_STACK / steps / (flops / 2e14))  # a modest rate for any card of the last years
    return max(2, min(fitting, in_time, _MAX_LAYERS))


def _parameters(region: RegionGraph) -> list[int]:
    return [index for index, storage in enumerate(region.storages) if storage.kind == "parameter"]


def measure_copies(device: torch.device, num_bytes: int) -> CopyRate:
    """The rate of copies of `num_bytes`, each way alone and both at once, by the host's clock: the best of five."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    second = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    outward, inward = torch.Stream(device), torch.Stream(device)

    def seconds(out: bool, back: bool) -> float:
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        if out:
            with outward:
                host.copy_(there, non_blocking=True)
        if back:
            with inward:
                other.copy_(second, non_blocking=True)
        torch.accelerator.synchronize(device)
        return time.perf_counter() - started

    def best(out: bool, back: bool) -> float:
        return min(seconds(out, back) for _ in range(5))

    return CopyRate(num_bytes / best(True, False), num_bytes / best(False, True), 2 * num_bytes / best(True, True))


def main() -> None:
    """Check, measure, write; exit with 1 if any policy gave other numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="the device (default: cuda)")
    parser.add_argument("--small", action="store_true", help="small shapes, for a try")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each policy (default: 3)")
    parser.add_argument("--out", type=Path, default=OUT, help="path of the two files, without suffix")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    small = arguments.small or device.type == "cpu"
    copies = None if device.type == "cpu" else measure_copies(device, 2**30)
    checks = list(check_numbers(device))
    stacks: list[tuple[BenchResult, str]] = []
    for preset in ("qwen3-8b", "qwen3-30b-a3b"):
        _write(arguments.out, device, checks, stacks, copies)  # a time limit then loses the rest only
        stacks.append(measure_stack(preset, device, small=small, rounds=arguments.rounds))
    print(_write(arguments.out, device, checks, stacks, copies), flush=True)
    wrong = [check for check in checks if not check.agreement.holds]
    sys.exit(1 if wrong or any(result.disagreeing for result, _ in stacks) else 0)


def _write(
    out: Path,
    device: torch.device,
    checks: list[Check],
    stacks: list[tuple[BenchResult, str]],
    copies: CopyRate | None,
) -> str:
    """Write what there is so far; returns the text."""
    machine, card = Machine.here_and_now(), _card(device)
    text = _text(machine, card, checks, stacks, copies)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".txt").write_text(text, encoding="utf-8")
    data = {
        "command": _command(),
        "machine": asdict(machine),
        "card": card,
        "checks": [asdict(check) for check in checks],
        "stacks": [result.to_dict() for result, _ in stacks],
        "copies": None if copies is None else asdict(copies),
    }
    out.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return text


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _command() -> str:
    return " ".join(["python -m benchmarks.gpu_acceptance", *sys.argv[1:]])


def _text(
    machine: Machine, card: str, checks: list[Check], stacks: list[tuple[BenchResult, str]], copies: CopyRate | None
) -> str:
    console = Console(file=io.StringIO(), width=140, markup=False, highlight=False)
    console.print(f"{machine}; {card}; {machine.date}")
    console.print(f"$ {_command()}")
    equal = sum(check.agreement.is_bitwise for check in checks)
    within = sum(check.agreement.holds for check in checks) - equal
    console.print(
        f"{len(checks)} cases of gradients against the unplanned model: {equal} equal to the bit, {within} within the "
        f"spread of unplanned steps, {len(checks) - equal - within} WRONG"
    )
    for check in checks:
        if not check.agreement.holds:
            console.print(f"  WRONG: {check.case} under {check.policy}, off by {check.agreement.difference:.1e}")
    for result, size in stacks:
        console.print(f"\n{result.setting}, {size}, gradients standing")
        console.print(bench_table(result))
        console.print(swap_table(result))
        for note in bench_notes(result):
            console.print(note)
    if copies is not None:
        rates = f"{copies.out / 1e9:.1f} out, {copies.back / 1e9:.1f} back, {copies.both / 1e9:.1f} both at once"
        console.print(f"\nCopies of 1 GiB between the device and pinned memory, GB/s: {rates}")
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


if __name__ == "__main__":
    main()
