"""The planner against the clock and the allocator of this machine.

`accuracy`: peaks and step times that were predicted after a calibration, beside measured ones, for a dozen plans.
`dominance`: at the measured peak of each of torch's ways and of fixed policies, the plan for that budget, side by side;
and the same against a compiled model with torch's activation memory budget, each by its own step without a budget.

    python -m benchmarks.planned accuracy dominance [--rounds 5]
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from actmem.cli.bench import model_and_batch
from actmem.cli.calibrate import training_step
from actmem.cli.progress import progress
from actmem.config.schema import DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from actmem.hardware import Hardware, save_hardware
from actmem.measuring.bench import num_steps, run_bench
from actmem.measuring.calibration import calibrate
from actmem.measuring.result import BenchResult
from actmem.planning import Action, Plan, Rule
from actmem.planning.frontier import budgets
from actmem.planning.planner import Planner
from actmem.planning.simulation import Simulation
from actmem.reporting.tables import plain_table
from actmem.training.budget import planner_of
from actmem.training.traced import trace_step
from benchmarks.compiled import measure_compiled
from benchmarks.machine import Machine
from benchmarks.run import RESULTS, dense, moe

LAYERS = 4
MODELS: dict[str, ModelConfig] = {"dense": dense(512, LAYERS), "moe": moe(512, LAYERS)}
LENGTH = 1024
NUM_BUDGETS = 7
EVERY_SECOND = Plan("every second layer", (Rule(".*", Action.RECOMPUTE, tuple(range(0, LAYERS, 2))),))
_SAME_TIME = 0.05  # plans whose measured times differ by less have no order
_MEMORY = MemoryConfig(min_swap_bytes=2**18)
_TO_DISK = {"accuracy": True, "dominance": False}
"""Whether plans may swap: on the CPU to the disk, where a budget holds only while the writes keep up."""


@dataclass(frozen=True)
class Prediction:
    """One plan: its peak above what stands, and its step time, predicted and measured."""

    plan: str
    predicted_bytes: int
    measured_bytes: int
    predicted_seconds: float
    measured_seconds: float
    quartiles: tuple[float, float]

    @property
    def peak_ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted_bytes / self.measured_bytes

    @property
    def time_ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted_seconds / self.measured_seconds


@dataclass(frozen=True)
class Duel:
    """A way that others recompute, and the best plan at its measured peak; `ratio` is of times, round by round."""

    other: str
    peak_bytes: int
    auto_peak_bytes: int
    seconds: float
    auto_seconds: float
    ratio: float
    quartiles: tuple[float, float]


def run_of(model: ModelConfig, *, to_disk: bool) -> RunConfig:
    """A run of one sequence on the CPU."""
    return RunConfig(
        model=model,
        data=DataConfig(path=["none"], sequence_length=LENGTH),
        train=TrainConfig(device="cpu", micro_batch_size=1),
        memory=_MEMORY.model_copy(update={"tier": "disk" if to_disk else "auto"}),
    )


class Bench:
    """One model on this machine, calibrated, with a planner for its step."""

    def __init__(self, name: str, *, to_disk: bool) -> None:
        run = run_of(MODELS[name], to_disk=to_disk)
        self.model, self.batch = model_and_batch(run)
        with tempfile.TemporaryDirectory() as directory:
            self.hardware: Hardware = calibrate(self.model.device, Path(directory), training_step(run))
            path = Path(directory) / "hardware.yaml"
            save_hardware(self.hardware, path)
            run = run.model_copy(update={"hardware": str(path)})
            graph = trace_step(run, kernels_on=self.model.device)
            self.planner: Planner = planner_of(run, graph, gradients_stand=True)
        assert graph.step is not None
        self.standing = graph.step.standing.total
        self.name = name

    def measure(self, plans: Sequence[str | Plan], rounds: int) -> BenchResult:
        """All of them side by side."""
        with progress(self.name, num_steps(plans, rounds)) as on_step:
            return run_bench(self.model, self.batch, plans, rounds=rounds, memory=_MEMORY, on_step=on_step)

    def plan_for(self, peak_bytes: int, name: str = "auto") -> Plan:
        """The best plan whose peak, above what stands, is at most `peak_bytes`."""
        return self.planner.plan(peak_bytes + self.standing, name=name).plan


def accuracy(bench: Bench, rounds: int) -> list[Prediction]:
    """A dozen plans and more, predicted and measured."""
    planner = bench.planner
    plans: list[str | Plan] = ["none", "full", "mlp", "selective", "attention-swap", "layer-swap", EVERY_SECOND]
    plans += [planner.plan(budget).plan for budget in budgets(planner, NUM_BUDGETS)[:-1]]
    found = bench.measure(plans, rounds)
    return [
        _prediction(planner.simulate(plan), found, plan if isinstance(plan, str) else plan.name, bench.standing)
        for plan in plans
    ]


def _prediction(simulation: Simulation, found: BenchResult, name: str, standing: int) -> Prediction:
    measured = found[name]
    return Prediction(
        plan=name,
        predicted_bytes=simulation.peak_bytes - standing,
        measured_bytes=measured.peak_bytes,
        predicted_seconds=simulation.seconds,
        measured_seconds=measured.timing.median,
        quartiles=measured.timing.quartiles,
    )


def order_kept(predictions: Sequence[Prediction]) -> tuple[int, int]:
    """Of how many pairs of plans whose times differ was the order predicted, and how many such pairs there are."""
    pairs = [
        (a, b) for a, b in combinations(predictions, 2) if abs(a.measured_seconds / b.measured_seconds - 1) > _SAME_TIME
    ]
    kept = sum(
        (a.predicted_seconds < b.predicted_seconds) == (a.measured_seconds < b.measured_seconds) for a, b in pairs
    )
    return kept, len(pairs)


def dominance(bench: Bench, rounds: int) -> list[Duel]:
    """The best plan at each other way's measured peak, against it."""
    others: list[str | Plan] = ["torch-full", "torch-sac", "mlp", EVERY_SECOND]
    peaks = bench.measure(others, 1)
    names = [each if isinstance(each, str) else each.name for each in others]
    rivals = [bench.plan_for(peaks[name].peak_bytes, f"auto@{name}") for name in names]
    found = bench.measure([*others, *rivals], rounds)
    duels = []
    for name, rival in zip(names, rivals, strict=True):
        other, auto = found[name], found[rival.name]
        ratios = sorted(a / b for a, b in zip(auto.timing.seconds, other.timing.seconds, strict=True))
        duels.append(
            Duel(
                other=name,
                peak_bytes=other.peak_bytes,
                auto_peak_bytes=auto.peak_bytes,
                seconds=other.timing.median,
                auto_seconds=auto.timing.median,
                ratio=median(ratios),
                quartiles=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
            )
        )
    return duels


def accuracy_table(predictions: Sequence[Prediction]) -> Table:
    """A row for each plan, and what they come to."""
    heads = ("predicted\nMiB", "measured\nMiB", "ratio", "predicted\nms", "measured\nms", "ratio")
    table = plain_table("plan", heads, ())
    for each in predictions:
        table.add_row(
            each.plan,
            f"{each.predicted_bytes / 2**20:.1f}",
            f"{each.measured_bytes / 2**20:.1f}",
            f"{each.peak_ratio:.3f}",
            f"{each.predicted_seconds * 1e3:,.0f}",
            f"{each.measured_seconds * 1e3:,.0f}",
            f"{each.time_ratio:.2f}",
        )
    return table


def accuracy_notes(predictions: Sequence[Prediction]) -> list[str]:
    """How far off the predictions are."""
    peaks = [abs(each.peak_ratio - 1) for each in predictions]
    times = [abs(each.time_ratio - 1) for each in predictions]
    kept, pairs = order_kept(predictions)
    return [
        f"peaks off by {median(peaks):.2%} in the middle and {max(peaks):.2%} at most",
        f"step times off by {median(times):.1%} in the middle and {max(times):.1%} at most",
        f"order of times right in {kept} of {pairs} pairs that differ by more than {_SAME_TIME:.0%}",
    ]


def dominance_table(duels: Sequence[Duel]) -> Table:
    """A row for each duel."""
    table = plain_table(
        "against", ("its\nMiB", "auto's\nMiB", "its\nms", "auto's\nms", "auto\nof its", "quartiles"), ()
    )
    for each in duels:
        table.add_row(
            each.other,
            f"{each.peak_bytes / 2**20:.1f}",
            f"{each.auto_peak_bytes / 2**20:.1f}",
            f"{each.seconds * 1e3:,.0f}",
            f"{each.auto_seconds * 1e3:,.0f}",
            f"{each.ratio:.3f}",
            f"{each.quartiles[0]:.3f} - {each.quartiles[1]:.3f}",
        )
    return table


def _report(name: str, rounds: int) -> None:
    """Run one benchmark on all models and write its two files."""
    machine = Machine.here_and_now()
    console = Console(file=io.StringIO(), width=130, markup=False, highlight=False)
    console.print(f"{LAYERS} layers, hidden 512, {LENGTH} tokens, float32; gradients standing; after a calibration")
    console.print(f"{machine}; {machine.date}")
    console.print(f"$ python -m benchmarks.planned {name} --rounds {rounds}")
    data: dict[str, object] = {"machine": asdict(machine)}
    for model in MODELS:
        bench = Bench(model, to_disk=_TO_DISK[name])
        console.print(f"\n{model}: {bench.hardware.note}")
        data[model] = [asdict(each) for each in _show[name](console, bench, rounds)]
    assert isinstance(console.file, io.StringIO)
    text = "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())
    (RESULTS / f"{name}.txt").write_text(text, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(text, flush=True)


def _show_accuracy(console: Console, bench: Bench, rounds: int) -> list[Prediction]:
    predictions = accuracy(bench, rounds)
    console.print(accuracy_table(predictions))
    for note in accuracy_notes(predictions):
        console.print(note)
    return predictions


def _show_dominance(console: Console, bench: Bench, rounds: int) -> list[Duel]:
    duels = dominance(bench, rounds)
    console.print(dominance_table(duels))
    console.print(str(measure_compiled(bench.model, bench.batch, bench.plan_for, rounds)))
    return duels


_show: dict[str, Callable[[Console, Bench, int], Sequence[Prediction | Duel]]] = {
    "accuracy": _show_accuracy,
    "dominance": _show_dominance,
}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(_show)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each plan (default: 5)")
    arguments = parser.parse_args()
    for name in arguments.names or _show:
        _report(name, arguments.rounds)


if __name__ == "__main__":
    main()
