"""Whole runs of two processes: the loss of one process, resumed to the bit, and read under another layout."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import free_ports
from safetensors.torch import load_file
from torch import multiprocessing
from transformers import AutoModelForCausalLM

from actmem._compat import end_process
from actmem.config.loading import parse_config
from actmem.config.schema import RunConfig
from actmem.models.shapes import build_shapes
from actmem.training.budget import planner_of
from actmem.training.metrics import EvalRecord, StepRecord, read_metrics
from actmem.training.traced import trace_step
from actmem.training.trainer import train

pytestmark = pytest.mark.ranks

TEXT = Path(__file__).parents[2] / "actmem" / "runtime"
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
HALVES = {"train": {"micro_batch_size": 2}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"parallel": {"dp_replicate_size": 2}, **HALVES},
    "shards": {"parallel": {"dp_shard_size": 2}, **HALVES},
    "tensors": {"parallel": {"tp_size": 2}},
    "sequence": {
        "parallel": {"tp_size": 2, "sequence_parallel": True, "loss_parallel": True},
        "policy": "attention-swap",
    },
    "swapped tensors": {"parallel": {"tp_size": 2}, "policy": "layer-swap"},
    "gathered again": {
        "parallel": {"tp_size": 2, "sequence_parallel": True},
        "policy": None,
        "recompute_comm": {"enable": True, "select_module": {".*all_gather": ["0-3"]}},
    },
    "stages": {"parallel": {"pp_size": 2, "pp_microbatches": 4}, "policy": "attention-swap"},
    "budget of stages": {"parallel": {"pp_size": 2, "pp_microbatches": 4}, "policy": None, "memory_budget": 0.5},
    "budget of tensors": {"parallel": {"tp_size": 2}, "policy": None, "memory_budget": 0.5},
    "two stages each": {"parallel": {"pp_size": 2, "pp_microbatches": 4, "pp_schedule": "ZBVZeroBubble"}},
}
STEPS, HALF = 4, 2
READERS = ("tensors", "stages", "alone")


def config(root: Path, name: str, layout: dict[str, Any]) -> RunConfig:
    settings: dict[str, Any] = {
        "model": {"config": FIELDS},
        "data": {
            "path": [f"{TEXT}/*.py"],
            "sequence_length": 32,
            "vocab_size": 512,
            "eval_share": 0.2,
            "cache_dir": str(root / "cache"),
        },
        "train": {
            "steps": STEPS,
            "micro_batch_size": 4,
            "warmup_steps": 1,
            "lr": 0.01,
            "checkpoint_every": HALF,
            "eval_every": STEPS,
            "eval_batches": 100,  # all there is
            "device": "cpu",
            "output_dir": str(root / name),
        },
        "policy": "selective",
        "parallel": {"timeout_seconds": 60.0},
        "memory": {"min_swap_bytes": 0, "verify": "always"},
    }
    for key, value in layout.items():
        settings[key] = settings[key] | value if isinstance(value, dict) and key in settings else value
    return parse_config(settings)


def forget_second_half(root: Path, name: str, onto: str) -> None:
    """A run as it stood at its first checkpoint."""
    shutil.copytree(root / name / "checkpoints" / f"step-{HALF:08d}", root / onto / "checkpoints" / f"step-{HALF:08d}")


def train_as(rank: int, ports: list[int], run: RunConfig) -> None:
    """One run of two processes, told who they are as torchrun tells them. Each needs a port of its own."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports.pop()}
    os.environ.update({name: str(value) for name, value in told.items()})
    train(run, progress=False)


def work(rank: int, ports: list[int], directory: str) -> None:
    """All runs of two processes, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    root = Path(directory)
    for name, layout in LAYOUTS.items():
        train_as(rank, ports, config(root, name, layout))
    again = {f"{name} again": (name, name) for name in LAYOUTS}
    read = {f"{name} from shards": ("shards", name) for name in READERS[:-1]}
    for onto, (earlier, name) in (again | read | {"shards from alone": ("alone", "shards")}).items():
        if rank == 0:
            forget_second_half(root, earlier, onto)
        train_as(rank, ports, config(root, onto, LAYOUTS[name]))
    end_process(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(config(root, "alone", {}), progress=False)
    multiprocessing.spawn(work, args=(free_ports(2 * len(LAYOUTS) + len(READERS)), str(root)), nprocs=2)
    forget_second_half(root, "shards", "alone from shards")
    train(config(root, "alone from shards", {}), progress=False)
    return root


def losses(run: Path) -> dict[int, float]:
    return {each.step: each.loss for each in read_metrics(run / "metrics.jsonl") if isinstance(each, StepRecord)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_loss_of_one_process(runs: Path, name: str) -> None:
    assert losses(runs / name) == pytest.approx(losses(runs / "alone"), rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_evaluated_on_the_text_of_one_process(runs: Path, name: str) -> None:
    (mine,), (expected,) = (
        [each for each in read_metrics(runs / run / "metrics.jsonl") if isinstance(each, EvalRecord)]
        for run in (name, "alone")
    )
    assert mine.eval_loss == pytest.approx(expected.eval_loss, rel=1e-4)
    assert mine.num_tokens == expected.num_tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_ends_in_the_same_bits(runs: Path, name: str) -> None:
    one, other = (load_file(runs / each / "model" / "model.safetensors") for each in (name, f"{name} again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[each], other[each]) for each in one)
    assert min(losses(runs / f"{name} again")) == HALF + 1


@pytest.mark.parametrize("name", [f"{each} from shards" for each in READERS] + ["shards from alone"])
def test_a_checkpoint_is_read_under_another_layout(runs: Path, name: str) -> None:
    expected = losses(runs / "alone")
    assert losses(runs / name) == pytest.approx({step: expected[step] for step in (HALF + 1, STEPS)}, rel=1e-4)


@pytest.mark.parametrize("name", ["shards", "stages", "tensors"])
def test_the_exported_model_is_one_that_transformers_loads(runs: Path, name: str) -> None:
    tokens = torch.arange(64).view(2, 32) * 7 % 512
    models = [AutoModelForCausalLM.from_pretrained(runs / each / "model") for each in (name, "alone")]
    mine, expected = (float(model(input_ids=tokens, labels=tokens).loss.detach()) for model in models)
    assert mine == pytest.approx(expected, rel=1e-3)
    shapes = [{each: tuple(p.shape) for each, p in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1]


def test_what_is_swapped_of_a_spread_model_is_what_is_predicted(runs: Path) -> None:
    """DTensors stay, and no plan speaks of swapping them."""
    run = config(runs, "swapped tensors", LAYOUTS["swapped tensors"])
    model = build_shapes(run.model, vocab_size=FIELDS["vocab_size"])
    plans = planner_of(run, trace_step(run, model)).layer_plans("layer-swap")
    last = [each for each in read_metrics(runs / "swapped tensors" / "metrics.jsonl") if isinstance(each, StepRecord)][
        -1
    ]
    assert last.rank_swap is not None
    for each in last.rank_swap:
        assert each["num_begun"] == sum(len(plan.fates.swapped) for plan in plans) > 0
        assert each["num_unfit"] == each["num_refused"] == 0


def test_metrics_tell_of_all_ranks(runs: Path) -> None:
    last = [each for each in read_metrics(runs / "shards" / "metrics.jsonl") if isinstance(each, StepRecord)][-1]
    assert last.rank_peak_bytes is not None
    assert len(last.rank_peak_bytes) == 2
    assert last.peak_bytes == max(last.rank_peak_bytes)
    assert last.num_tokens == 4 * 32
    assert last.rank_swap is None
    sequence = [each for each in read_metrics(runs / "sequence" / "metrics.jsonl") if isinstance(each, StepRecord)]
    assert sequence[-1].rank_swap is not None
    assert all(each["num_begun"] > 0 for each in sequence[-1].rank_swap)
    steps = [each for each in read_metrics(runs / "stages" / "metrics.jsonl") if isinstance(each, StepRecord)]
    assert steps[0].rank_swap is not None and steps[-1].rank_swap is not None
    begun = [[each["num_begun"] for each in step.rank_swap] for step in (steps[0], steps[-1])]
    assert begun[0][0] == begun[0][1] > 0, "both stages begin as many copies"
    assert begun[1][0] > begun[1][1] == 0, "under 1F1B the second stage has nothing to swap once that is known"
