"""How the cost of a step grows with the devices: Qwen3-235B-A22B on 64 to 4,096 H100s, all of it modelled.

python -m benchmarks.scaling
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from actmem.config.loading import load_config
from actmem.config.schema import RunConfig
from actmem.hardware import CostModel, Hardware
from actmem.planning.pipeline import PipelineGraph
from actmem.training.budget import hardware_of, pipeline_planner_of, plan_with
from actmem.training.traced import trace_pipeline
from actmem.units import format_bytes
from benchmarks.run import RESULTS

CONFIG = Path(__file__).parents[1] / "configs" / "qwen3_235b_a22b_pp8_ep8.yaml"
MICROBATCHES = (8, 16, 32, 64)
COPIES = (1, 2, 8, 64)


@dataclass(frozen=True)
class Point:
    """One layout. `added_share`: by how much its plan makes the step longer; `gather_seconds` and `sum_seconds` are
    what parameters and gradients take from rank to rank in a step if nothing hides them, within a node and between
    copies."""

    devices: int
    microbatches: int
    peak_bytes: int
    unplanned_peak_bytes: int
    step_seconds: float
    added_share: float
    bubble_share: float
    tokens_per_second_per_device: float
    gather_seconds: float
    sum_seconds: float


def points() -> Iterator[Point]:
    """The number of micro-batches first, then copies of the layout that the configuration has."""
    for count in MICROBATCHES:
        run = load_config(CONFIG, [f"parallel.pp_microbatches={count}", f"train.micro_batch_size={count}"])
        yield from _points(run, COPIES if count == 32 else (1,))


def _points(run: RunConfig, copies: tuple[int, ...]) -> Iterator[Point]:
    pipeline, hardware = trace_pipeline(run), hardware_of(run)
    found = plan_with(pipeline_planner_of(run, pipeline), run)
    tokens = run.train.micro_batch_size * run.data.sequence_length * run.parallel.dp_shard_size
    for count in copies:
        devices = run.parallel.world_size * count
        yield Point(
            devices=devices,
            microbatches=pipeline.num_microbatches,
            peak_bytes=found.simulation.peak_bytes,
            unplanned_peak_bytes=found.unplanned.peak_bytes,
            step_seconds=found.simulation.seconds,
            added_share=found.added_share,
            bubble_share=found.simulation.bubble_share,
            tokens_per_second_per_device=tokens * count / found.simulation.seconds / devices,
            gather_seconds=_gather_seconds(pipeline, hardware, run.parallel.dp_shard_size),
            sum_seconds=_sum_seconds(pipeline, hardware, count),
        )


def _gather_seconds(pipeline: PipelineGraph, hardware: Hardware, shards: int) -> float:
    """A stage's parameters gathered once, those that are shared out, and their gradients summed and scattered."""
    stood = [stage.step.standing for stage in pipeline.stages if stage.step]
    gathered = max(each.parameters - each.gradients for each in stood)  # beside its share, a rank has a whole copy
    return CostModel(hardware).transfer_seconds(2 * gathered * (shards - 1) // shards)


def _sum_seconds(pipeline: PipelineGraph, hardware: Hardware, copies: int) -> float:
    """Each rank's shard of the gradients summed over all copies, between nodes, in a ring."""
    largest = max(stage.step.standing.gradients for stage in pipeline.stages if stage.step)
    passed_on = round(2 * largest * (copies - 1) / copies)
    return CostModel(hardware).transfer_seconds(passed_on, ranks_between=pipeline.ranks_between)


def main() -> None:
    """Run it and write benchmarks/results/scaling.{txt,json}."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0]
    ).parse_args()
    lines = [
        "Qwen3-235B-A22B, bfloat16, 94 layers in 8 stages (1F1B), experts and shards over 8 ranks of a node; 1 x 4096",
        "tokens a micro-batch and rank; at most 72 GiB on each rank; h100-sxm, nominal efficiency, modelled",
        "$ python -m benchmarks.scaling",
        "",
        "devices  micro-batches    peak  unplanned  step s  by plan  waiting  tokens/s/device  gather s  sum s",
    ]
    found = []
    for point in points():
        found.append(asdict(point))
        lines.append(
            f"{point.devices:>7}{point.microbatches:>15}{format_bytes(point.peak_bytes):>10}"
            f"{format_bytes(point.unplanned_peak_bytes):>10}{point.step_seconds:>8.2f}{point.added_share:>+9.1%}"
            f"{point.bubble_share:>9.1%}{point.tokens_per_second_per_device:>17,.0f}{point.gather_seconds:>10.2f}"
            f"{point.sum_seconds:>7.2f}"
        )
        print(lines[-1], flush=True)
    (RESULTS / "scaling.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (RESULTS / "scaling.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
