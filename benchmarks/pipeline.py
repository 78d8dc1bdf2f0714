"""Two stages under 1F1B: the peak of each rank and the step, with attention swapped and without.

python -m benchmarks.pipeline [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

from actmem._compat import end_process
from actmem.config.schema import ParallelConfig
from actmem.config.stages import layers_of_stages
from actmem.memory import measure_peak
from actmem.models.building import build_model
from actmem.parallel.pipeline import Pipeline, StageShape, cut, layers_here
from actmem.runtime import apply
from actmem.runtime.pipeline import PipelineSwaps
from actmem.training.loss import states_loss
from benchmarks.machine import Machine
from benchmarks.run import RESULTS, dense

LAYERS, HIDDEN, LENGTH, MICROBATCHES = 8, 512, 512, 8
POLICIES = ("none", "selective", "full", "attention-swap")
CPU = torch.device("cpu")
WARM_UP = 3  # a stage learns its layers in the first step, and its order of actions


def _step(rank: int, policy: str, stack: ExitStack) -> Callable[[], object]:
    parallel = ParallelConfig(pp_size=2, pp_microbatches=MICROBATCHES)
    first, end = layers_of_stages(parallel, LAYERS)[rank]
    config = dense(HIDDEN, LAYERS)
    fields = dict(config.config or {}) | {"tie_word_embeddings": False}
    model = build_model(config.model_copy(update={"config": fields}), seed=0)
    stage = cut(model, first, end)
    layers = layers_here([(first, end)])
    memory = {"tier": "disk", "verify": "off", "min_swap_bytes": 2**18}
    stages = nn.ModuleList([stage])
    applied = stack.enter_context(apply(stages, policy, memory=memory, layers=layers))
    stack.callback(lambda: stages)  # a plan goes when what it was applied to does
    tokens = torch.randint(model.config.vocab_size, (MICROBATCHES, LENGTH + 1))

    def loss(states: Tensor, targets: Tensor) -> Tensor:
        return states_loss(stage.model, states, targets, kind="chunked") / tokens.numel()

    group = distributed.group.WORLD
    assert group is not None
    pipeline = Pipeline(
        {rank: stage},
        2,
        schedule="1F1B",
        num_microbatches=MICROBATCHES,
        shape=StageShape(1, LENGTH, HIDDEN, torch.float32),
        loss=loss,
        group=group,
        device=CPU,
        swaps=PipelineSwaps(applied.swapper if policy != "none" else None),
    )
    return lambda: pipeline.step(tokens[:, :-1], tokens[:, 1:])


def _work(rank: int, port: int, rounds: int, directory: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with ExitStack() as stack:
        steps = {policy: _step(rank, policy, stack) for policy in POLICIES}
        for policy in POLICIES:
            for _ in range(WARM_UP):
                steps[policy]()
        seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for index in range(rounds):
            for policy in (*POLICIES[index % len(POLICIES) :], *POLICIES[: index % len(POLICIES)]):
                distributed.barrier()
                started = time.perf_counter()
                steps[policy]()
                distributed.barrier()
                seconds[policy].append(time.perf_counter() - started)
        found = {}
        for policy in POLICIES:
            peak = measure_peak(steps[policy], CPU).peak_bytes
            ratios = [a / b for a, b in zip(seconds[policy], seconds["none"], strict=True)]
            found[policy] = {"peak_bytes": peak, "seconds": median(seconds[policy]), "of_none": median(ratios)}
        Path(directory, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    end_process(0)


def main() -> None:
    """Run it and write benchmarks/results/pipeline.{txt,json}."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each policy (default: 5)")
    rounds = parser.parse_args().rounds
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as directory:
        spawn(_work, args=(port, rounds, directory), nprocs=2)
        ranks: list[dict[str, Any]] = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(2)]
    machine = Machine.here_and_now()
    lines = [
        f"dense, {LAYERS} layers in two stages, hidden {HIDDEN}, 1F1B, {MICROBATCHES} micro-batches of 1 x {LENGTH}, "
        "float32; gradients standing; one thread a rank",
        f"{machine}; {machine.date}",
        f"$ python -m benchmarks.pipeline --rounds {rounds}",
        "",
        f"{'policy':<16}{'rank 0 MiB':>11}{'of none':>9}{'rank 1 MiB':>12}{'of none':>9}{'step ms':>9}{'of none':>9}",
    ]
    for policy in POLICIES:
        first, last = (rank[policy] for rank in ranks)
        shares = [rank[policy]["peak_bytes"] / rank["none"]["peak_bytes"] for rank in ranks]
        lines.append(
            f"{policy:<16}{first['peak_bytes'] / 2**20:>11.1f}{shares[0]:>9.2f}{last['peak_bytes'] / 2**20:>12.1f}"
            f"{shares[1]:>9.2f}{first['seconds'] * 1e3:>9,.0f}{first['of_none']:>9.3f}"
        )
    text = "\n".join(lines) + "\n"
    (RESULTS / "pipeline.txt").write_text(text, encoding="utf-8")
    data = {"machine": asdict(machine), "ranks": ranks}
    (RESULTS / "pipeline.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
