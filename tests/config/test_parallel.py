"""The section `parallel`: layouts right and wrong, what is said of each, and how a pipeline cuts the layers.

The dense model has 4 layers, 8 heads, 4 of them for keys and values, and a vocabulary of 4096; the mixture of experts
is alike, with 8 experts. A batch has 8 sequences of 1024 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import Qwen3Config, Qwen3MoeConfig

from actmem.config.loading import parse_config
from actmem.config.rules import idle_settings
from actmem.config.schema import ModelConfig, ParallelConfig, RunConfig
from actmem.config.sizes import is_dense, is_moe, is_tied, router_loss_share, size
from actmem.config.stages import (
    SINGLE_STAGE_SCHEDULES,
    V_SCHEDULES,
    layers_of_stages,
    num_stages,
    stages_of_rank,
    stages_per_rank,
)
from actmem.config.wording import names_at
from actmem.errors import ConfigError, Fault
from actmem.parallel.world import refuse_other_number

DENSE = "{name: qwen3-tiny, config: {tie_word_embeddings: false}}"
MOE = "{name: qwen3-moe-tiny, config: {tie_word_embeddings: false, router_aux_loss_coef: 0}}"
TIED = "{name: qwen3-tiny}"
SCHEDULES = names_at(("parallel", "pp_schedule"))


def run_text(
    parallel: str, model: str = DENSE, *, data: str = "sequence_length: 1024", train: str = "micro_batch_size: 8"
) -> str:
    return f"model: {model}\ndata: {{path: [a.txt], {data}}}\ntrain: {{{train}}}\nparallel: {{{parallel}}}\n"


def with_fields(model: str, fields: str) -> str:
    return model.replace("config: {", f"config: {{{fields}, ")


def faults_of(text: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.yaml")
    return caught.value.faults


SIX_LAYERS = with_fields(DENSE, "num_hidden_layers: 6")
TWELVE_LAYERS = with_fields(DENSE, "num_hidden_layers: 12")
SOUND: list[str] = [
    run_text(""),
    run_text("dp_replicate_size: 3, dp_shard_size: 5"),
    run_text("timeout_seconds: 0.5"),
    run_text("timeout_seconds: 30"),
    # tensor parallel
    run_text("tp_size: 2"),
    run_text("tp_size: 4", TIED),
    run_text("tp_size: 4", MOE),
    run_text("tp_size: 2", with_fields(MOE, "num_local_experts: 6, num_experts: 6")),
    run_text("tp_size: 4", with_fields(MOE, "intermediate_size: 7")),
    run_text("tp_size: 4, sequence_parallel: true, loss_parallel: true"),
    run_text("tp_size: 2, sequence_parallel: true", MOE),
    run_text("tp_size: 3", "{config: {num_hidden_layers: 4}}"),
    run_text("tp_size: 3", "{config: {model_type: other, hidden_size: 3, intermediate_size: 7}}"),
    run_text("loss_parallel: true, tp_size: 2", data="vocab_size: 1024"),
    run_text("loss_parallel: true, tp_size: 2", with_fields(DENSE, "vocab_size: 1024"), data="vocab_size: 1023"),
    run_text("loss_parallel: true, tp_size: 2", data="tokenizer: ., vocab_size: 1023"),
    run_text("sequence_parallel: false, tp_size: 2", data="sequence_length: 1023"),
    run_text("loss_parallel: false", "{name: qwen3-tiny, loss: chunked}"),
    # expert parallel
    run_text("ep_size: 2, dp_shard_size: 4", MOE),
    run_text("ep_size: 8, dp_shard_size: 8", MOE),
    run_text("ep_size: 2, dp_shard_size: 4", "{config: {num_experts: 7}}"),
    # pipelines
    run_text("pp_size: 2"),
    run_text("pp_size: 4"),
    run_text("pp_size: 2", MOE),
    run_text("pp_size: 2, pp_microbatches: 2"),
    run_text("pp_size: 2, pp_schedule: GPipe, pp_microbatches: 1"),
    run_text("pp_size: 2, pp_schedule: LoopedBFS, pp_microbatches: 1"),
    run_text("pp_size: 2, pp_schedule: ZBVZeroBubble, pp_microbatches: 1"),
    run_text("pp_size: 2, pp_schedule: DualPipeV, pp_microbatches: 4"),
    run_text("pp_size: 2, pp_schedule: Interleaved1F1B, pp_microbatches: 4"),
    run_text("pp_size: 2, pp_schedule: InterleavedZeroBubble, pp_microbatches: 1"),
    run_text(
        "pp_size: 4, pp_schedule: Interleaved1F1B, pp_microbatches: 10", TWELVE_LAYERS, train="micro_batch_size: 10"
    ),
    run_text("pp_size: 2, pp_layers: [1, 3]"),
    run_text("pp_size: 2, pp_layers: null"),
    run_text("pp_size: 2") + "memory_budget: 0.5\n",
    run_text("tp_size: 2") + "memory_budget: 0.5\n",
    run_text("pp_size: 2, pp_layers: [1, 1, 2, 2], pp_schedule: ZBVZeroBubble", SIX_LAYERS),
    run_text("pp_size: 2, pp_layers: [1, 1, 1, 1, 1, 1], pp_schedule: LoopedBFS", SIX_LAYERS),
    run_text("pp_size: 2", train="micro_batch_size: 16"),
    run_text("pp_size: 3, pp_layers: [1, 1, 9]", "{config: {}}"),
    # what a pipeline forbids is allowed without one, and what it counts does not count
    run_text("pp_size: 1, pp_microbatches: 3, pp_layers: [7], pp_schedule: DualPipeV", TIED),
    run_text("", train="grad_accumulation: 4"),
    run_text("dp_shard_size: 2", "{name: qwen3-moe-tiny}"),
    # products
    run_text("dp_replicate_size: 2, dp_shard_size: 2, tp_size: 2, pp_size: 2"),
    run_text("dp_shard_size: 2, ep_size: 2, pp_size: 2", MOE),
]


@pytest.mark.parametrize("text", SOUND)
def test_a_sound_layout_is_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config(text)
    assert parse_config(config.model_dump(exclude_none=True)) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


TP, EP, PP = "parallel.tp_size", "parallel.ep_size", "parallel.pp_size"
SEQUENCE, LOSS = "parallel.sequence_parallel", "parallel.loss_parallel"
PIECES, LAYERS = "parallel.pp_microbatches", "parallel.pp_layers"

# Text -> path of the only fault, words of its problem, and what is allowed.
WRONG: list[tuple[str, str, str, str]] = [
    # what is not there for every layout
    (
        run_text("tp_size: 2", DENSE.replace("}}", "}, loss: chunked}")),
        "model.loss",
        "chunked needs the whole head on each rank, and parallel.tp_size 2 cuts it",
        "standard, or parallel.tp_size: 1",
    ),
    # kinds and ranges
    (
        run_text("dp_replicate_size: 0"),
        "parallel.dp_replicate_size",
        "0 is out of range",
        "a whole number of at least 1",
    ),
    (run_text("dp_shard_size: -1"), "parallel.dp_shard_size", "-1 is out of range", "a whole number of at least 1"),
    (run_text("tp_size: '2'"), TP, "'2' is text", "a whole number of at least 1"),
    (run_text("ep_size: 2.0"), EP, "2.0 is a number", "a whole number of at least 1"),
    (run_text("pp_size: true"), PP, "true is a truth value", "a whole number of at least 1"),
    (run_text("pp_microbatches: null"), PIECES, "is empty (null)", "a whole number of at least 1"),
    (run_text("sequence_parallel: 1"), SEQUENCE, "1 is a whole number", "true or false"),
    (run_text("loss_parallel: yes"), LOSS, "'yes' is text", "true or false"),
    (run_text("timeout_seconds: 0"), "parallel.timeout_seconds", "0 is out of range", "a number of at least 0.1"),
    (run_text("timeout_seconds: .inf"), "parallel.timeout_seconds", "inf is not finite", "a number of at least 0.1"),
    (run_text("pp_schedule: null"), "parallel.pp_schedule", "is empty (null)", ", ".join(SCHEDULES)),
    (run_text("pp_layers: 4"), LAYERS, "4 is a whole number", "a list of a whole number of at least 1 or null"),
    (run_text("pp_layers: []"), LAYERS, "[] is empty", "a list of a whole number of at least 1 or null"),
    (run_text("pp_layers: [4, 0]"), f"{LAYERS}[1]", "0 is out of range", "a whole number of at least 1"),
    (run_text("pp_layers: ['4']"), f"{LAYERS}[0]", "'4' is text", "a whole number of at least 1"),
    (run_text("pp_layers: [0-1]"), f"{LAYERS}[0]", "'0-1' is text", "a whole number of at least 1"),
    # tensor parallel
    (
        run_text("tp_size: 8"),
        TP,
        "8 does not divide num_key_value_heads 4",
        "divisors of 4, the greatest common one of num_attention_heads, num_key_value_heads, hidden_size, "
        "intermediate_size",
    ),
    (
        run_text("tp_size: 3"),
        TP,
        "3 does not divide num_attention_heads 8, num_key_value_heads 4, hidden_size 256",
        "divisors of 4",
    ),
    (
        run_text("tp_size: 4", with_fields(DENSE, "intermediate_size: 770")),
        TP,
        "intermediate_size 770",
        "divisors of 2",
    ),
    (run_text("tp_size: 4", with_fields(DENSE, "hidden_size: 258")), TP, "hidden_size 258", "divisors of 2"),
    (run_text("tp_size: 4", with_fields(MOE, "num_experts: 6")), TP, "num_experts 6", "divisors of 2"),
    (run_text("tp_size: 4", with_fields(MOE, "num_local_experts: 6")), TP, "num_experts 6", "divisors of 2"),
    (
        run_text("tp_size: 4", with_fields(MOE, "intermediate_size: 7, mlp_only_layers: [0]")),
        TP,
        "intermediate_size 7",
        "divisors of 1",
    ),
    (
        run_text("tp_size: 4", with_fields(MOE, "intermediate_size: 7, decoder_sparse_step: 2")),
        TP,
        "intermediate_size 7",
        "divisors of 1",
    ),
    (
        run_text("tp_size: 3", "{config: {hidden_size: 256}}"),
        TP,
        "3 does not divide hidden_size 256",
        "divisors of 256",
    ),
    (
        run_text("tp_size: 2, sequence_parallel: true", data="sequence_length: 1023"),
        SEQUENCE,
        "data.sequence_length 1023 on 2 ranks",
        "false, or a data.sequence_length that parallel.tp_size divides",
    ),
    (
        run_text("tp_size: 2, loss_parallel: true", with_fields(DENSE, "vocab_size: 1023")),
        LOSS,
        "the vocabulary of 1023 on 2 ranks",
        "false, or a vocabulary that parallel.tp_size divides",
    ),
    (run_text("tp_size: 2, loss_parallel: true", data="vocab_size: 1023"), LOSS, "the vocabulary of 1023", "false, or"),
    (
        run_text("loss_parallel: true", DENSE.replace("name", "loss: chunked, name")),
        LOSS,
        "is given beside model.loss: chunked",
        "false, or model.loss: standard",
    ),
    # expert parallel
    (run_text("ep_size: 2, dp_shard_size: 2"), EP, "the model is dense: it has none", "1, or a mixture of experts"),
    (run_text("ep_size: 3, dp_shard_size: 3", MOE), EP, "3 does not divide num_experts 8", "divisors of 8"),
    (run_text("ep_size: 16, dp_shard_size: 16", MOE), EP, "16 does not divide num_experts 8", "divisors of 8"),
    (
        run_text("ep_size: 4, dp_shard_size: 2", MOE),
        EP,
        "4 does not divide parallel.dp_shard_size 2",
        "divisors of 2",
    ),
    (run_text("ep_size: 4, dp_shard_size: 6", MOE), EP, "4 does not divide parallel.dp_shard_size 6", "divisors of 6"),
    (
        run_text("ep_size: 2, dp_shard_size: 2, tp_size: 2", MOE),
        EP,
        "is given beside parallel.tp_size: 2",
        "1, or parallel.tp_size: 1",
    ),
    # pipelines: stages
    (run_text("pp_size: 5"), PP, "5 ranks with 1 of 1F1B's stages each need 5 layers; the model has 4", "at most 4"),
    (
        run_text("pp_size: 3, pp_schedule: ZBVZeroBubble"),
        PP,
        "3 ranks with 2 of ZBVZeroBubble's stages each need 6 layers; the model has 4",
        "at most 2",
    ),
    (run_text("pp_size: 3, pp_schedule: LoopedBFS"), PP, "need 6 layers; the model has 4", "at most 2"),
    (
        run_text("pp_size: 2, pp_schedule: LoopedBFS", with_fields(DENSE, "num_hidden_layers: 1")),
        PP,
        "need 4 layers; the model has 1",
        "at most 1",
    ),
    (
        run_text("pp_size: 2, pp_layers: [2, 3]"),
        LAYERS,
        "[2, 3] are 5 layers; the model has 4",
        "layers of each stage, 4 in all",
    ),
    (run_text("pp_size: 2, pp_layers: [1, 2]"), LAYERS, "are 3 layers; the model has 4", "4 in all"),
    (
        run_text("pp_size: 2, pp_layers: [1, 1, 2]"),
        LAYERS,
        "has 3 entries, for 1F1B on 2 ranks",
        "a number for each of the 2 stages",
    ),
    (run_text("pp_size: 2, pp_layers: [4], pp_schedule: GPipe"), LAYERS, "has 1 entries", "each of the 2 stages"),
    (
        run_text("pp_size: 2, pp_layers: [2, 2], pp_schedule: ZBVZeroBubble"),
        LAYERS,
        "has 2 entries, for ZBVZeroBubble on 2 ranks",
        "a number for each of the 4 stages",
    ),
    (
        run_text("pp_size: 2, pp_layers: [1, 1, 1, 1, 1, 1], pp_schedule: DualPipeV", SIX_LAYERS),
        LAYERS,
        "has 6 entries",
        "a number for each of the 4 stages",
    ),
    (
        run_text("pp_size: 2, pp_layers: [2, 2], pp_schedule: Interleaved1F1B"),
        LAYERS,
        "has 2 entries, for Interleaved1F1B on 2 ranks",
        "a multiple of 2 numbers, at least 4",
    ),
    (
        run_text("pp_size: 2, pp_layers: [1, 1, 1, 1, 2], pp_schedule: LoopedBFS", SIX_LAYERS),
        LAYERS,
        "has 5 entries",
        "a multiple of 2 numbers, at least 4",
    ),
    # pipelines: micro-batches
    (
        run_text("pp_size: 2, pp_microbatches: 3"),
        PIECES,
        "3 does not divide train.micro_batch_size 8",
        "divisors of 8",
    ),
    (run_text("pp_size: 2", train="micro_batch_size: 4"), PIECES, "8 does not divide train.micro_batch_size 4", "of 4"),
    (run_text("pp_size: 4, pp_microbatches: 2"), PIECES, "2 are fewer than the 4 stages of 1F1B", "at least 4"),
    (
        run_text("pp_size: 2, pp_schedule: DualPipeV, pp_microbatches: 2"),
        PIECES,
        "2 are fewer than the 4 stages of DualPipeV",
        "at least 4",
    ),
    (
        run_text(
            "pp_size: 4, pp_schedule: Interleaved1F1B, pp_microbatches: 9", TWELVE_LAYERS, train="micro_batch_size: 9"
        ),
        PIECES,
        "9 do not fill the 2 rounds of Interleaved1F1B on 4 ranks",
        "multiples of 4, such as 8 or 12",
    ),
    (
        run_text("pp_size: 2, pp_schedule: InterleavedZeroBubble, pp_microbatches: 5", train="micro_batch_size: 5"),
        PIECES,
        "5 do not fill the 2 rounds of InterleavedZeroBubble on 2 ranks",
        "multiples of 2, such as 4 or 6",
    ),
    # pipelines: what crosses the stages
    (run_text("pp_size: 2", TIED), PP, "the model has tie_word_embeddings", "a model with tie_word_embeddings: false"),
    (
        run_text("pp_size: 2", MOE.replace(", router_aux_loss_coef: 0", "")),
        PP,
        "(router_aux_loss_coef 0.001) needs all layers on one rank",
        "1, or a model with router_aux_loss_coef: 0",
    ),
    (run_text("pp_size: 2", "{config: {model_type: qwen3_moe}}"), PP, "router_aux_loss_coef 0.001", "1, or a model"),
    (
        run_text("pp_size: 2", train="micro_batch_size: 8, grad_accumulation: 2"),
        "train.grad_accumulation",
        "2 steps are accumulated beside parallel.pp_size: 2",
        "1, with more parallel.pp_microbatches",
    ),
    # the section itself
    ("model: {name: qwen3-tiny}\ndata: {path: [a]}\nparallel: 2\n", "parallel", "2 is a whole number", "dp_shard_size"),
    ("model: {name: qwen3-tiny}\ndata: {path: [a]}\nparallel:\n", "parallel", "is empty (null)", "a section"),
]


@pytest.mark.parametrize(("text", "path", "words", "allowed"), WRONG, ids=[f"{case[1]}: {case[2]}" for case in WRONG])
def test_a_wrong_layout_has_the_one_fault(text: str, path: str, words: str, allowed: str) -> None:
    (fault,) = faults_of(text)
    assert fault.path == path
    assert words in fault.problem
    assert allowed in (fault.allowed or "")
    assert fault.line is not None and fault.column is not None


@pytest.mark.parametrize(
    ("parallel", "path", "nearest"),
    [
        ("pp_schedule: 1f1b", "parallel.pp_schedule", "1F1B"),
        ("pp_schedule: g_pipe", "parallel.pp_schedule", "GPipe"),
        ("pp_schedule: Interleaved-1F1B", "parallel.pp_schedule", "Interleaved1F1B"),
        ("pp_schedule: ZeroBubble", "parallel.pp_schedule", "ZBVZeroBubble"),
        ("pp_schedule: DualPipe", "parallel.pp_schedule", "DualPipeV"),
        ("pp_schedule: BFS", "parallel.pp_schedule", "LoopedBFS"),
        ("pp_schedule: xyz", "parallel.pp_schedule", None),
        ("tp: 2", "parallel.tp", "tp_size"),
        ("dp_shards: 2", "parallel.dp_shards", "dp_shard_size"),
        ("microbatches: 2", "parallel.microbatches", "pp_microbatches"),
        ("timeout: 3", "parallel.timeout", "timeout_seconds"),
        ("micro_batch_size: 3", "parallel.micro_batch_size", "train.micro_batch_size"),
    ],
)
def test_the_nearest_name_is_offered(parallel: str, path: str, nearest: str | None) -> None:
    (fault,) = faults_of(run_text(parallel))
    assert (fault.path, fault.nearest) == (path, nearest)


def test_a_key_of_the_section_at_the_top_level_is_sent_there() -> None:
    (fault,) = faults_of(run_text("") + "tp_size: 2\n")
    assert fault.nearest == TP


def test_all_faults_come_at_once_with_their_lines() -> None:
    text = """\
model: {name: qwen3-moe-tiny}
data: {path: [a], sequence_length: 1024}
train:
  micro_batch_size: 4
  grad_accumulation: 2
parallel:
  dp_shard_size: 4
  tp_size: 3
  ep_size: 3
  pp_size: 5
  sequence_parallel: true
  loss_parallel: true
  pp_schedule: 1F1B
  pp_microbatches: 3
  tp_sise: 2
"""
    found = [(fault.line, fault.path, fault.problem.split(" ")[0]) for fault in faults_of(text)]
    assert found == [
        (5, "train.grad_accumulation", "2"),
        (8, TP, "3"),
        (9, EP, "3"),
        (9, EP, "3"),
        (9, EP, "is"),
        (10, PP, "5"),
        (10, PP, "the"),
        (10, PP, "the"),
        (11, SEQUENCE, "true"),
        (12, LOSS, "true"),
        (14, PIECES, "3"),
        (14, PIECES, "3"),
        (15, "parallel.tp_sise", "is"),
    ]


def test_a_rule_waits_until_its_own_fields_are_sound() -> None:
    text = run_text("tp_size: x, ep_size: 2, dp_shard_size: 3, pp_size: 2, pp_layers: [x], pp_microbatches: 3", MOE)
    assert [(fault.path, fault.problem) for fault in faults_of(text)] == [
        (TP, "'x' is text"),
        (EP, "2 does not divide parallel.dp_shard_size 3, whose ranks share the experts"),
        (f"{LAYERS}[0]", "'x' is text"),
        (PIECES, "3 does not divide train.micro_batch_size 8"),
    ]


def test_sizes_are_read_from_the_directory_of_a_model(tmp_path: Path) -> None:
    fields = Qwen3MoeConfig(num_experts=6, num_hidden_layers=3, vocab_size=1001, tie_word_embeddings=True)
    fields.save_pretrained(tmp_path)
    text = run_text(
        "dp_shard_size: 4, ep_size: 4, pp_size: 4, tp_size: 1, loss_parallel: true", f"{{path: {tmp_path}}}"
    )
    assert [fault.problem.split(";")[0] for fault in faults_of(text)] == [
        "4 does not divide num_experts 6",
        "4 ranks with 1 of 1F1B's stages each need 4 layers",
        "the first and the last stage would share a weight: the model has tie_word_embeddings",
        "the router's auxiliary loss (router_aux_loss_coef 0.001) needs all layers on one rank",
    ]
    (fault,) = faults_of(run_text("tp_size: 2, loss_parallel: true", f"{{path: {tmp_path}}}"))
    assert fault.path == LOSS
    (tmp_path / "config.json").write_text("[]")
    assert parse_config(run_text("tp_size: 7, pp_size: 5, ep_size: 1", f"{{path: {tmp_path}}}"))


HUGE = 10**5000


@pytest.mark.parametrize("key", ["dp_replicate_size", "dp_shard_size", "tp_size", "pp_size", "ep_size"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_too_large_to_print_are_answered_too(key: str, schedule: str) -> None:
    mapping: dict[str, Any] = {"model": {"name": "qwen3-tiny"}, "data": {"path": ["a"]}}
    mapping["parallel"] = {"pp_schedule": schedule, "pp_size": 2, "ep_size": 2, "pp_layers": [HUGE, 1], key: HUGE}
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping)
    assert len(str(caught.value)) < 5000


IDLE: list[tuple[str, list[str]]] = [
    ("", []),
    ("tp_size: 1, pp_size: 1, ep_size: 1, timeout_seconds: 5", []),
    ("sequence_parallel: true", [SEQUENCE]),
    ("sequence_parallel: false, loss_parallel: false", []),
    ("loss_parallel: true, sequence_parallel: true", [SEQUENCE, LOSS]),
    ("tp_size: 2, loss_parallel: true, sequence_parallel: true", []),
    ("pp_schedule: 1F1B", ["parallel.pp_schedule"]),
    ("pp_size: 1, pp_microbatches: 8", [PIECES]),
    ("pp_layers: [4]", [LAYERS]),
    ("pp_layers: null", []),
    ("pp_size: 2, pp_layers: [2, 2], pp_schedule: 1F1B, pp_microbatches: 8", []),
]


@pytest.mark.parametrize(("parallel", "paths"), IDLE, ids=[case[0] for case in IDLE])
def test_settings_without_effect_are_warned_of(parallel: str, paths: list[str]) -> None:
    assert [warning.path for warning in idle_settings(parse_config(run_text(parallel)))] == paths


def test_a_warning_says_why() -> None:
    warnings = idle_settings(parse_config(run_text("loss_parallel: true, pp_microbatches: 4")))
    assert [warning.problem for warning in warnings] == [
        "has no effect while parallel.tp_size is 1",
        "has no effect while parallel.pp_size is 1",
    ]


@pytest.mark.parametrize(
    ("sizes", "number", "words"),
    [
        ({}, 2, ("is for 1 process, and 2 run", "dp_shard_size: 2, which", "dp_replicate_size: 2, which")),
        ({"tp_size": 2}, 4, ("is for tp_size 2 = 2 processes, and 4 run", "--nproc 2", "dp_shard_size: 2, which")),
        ({"dp_shard_size": 4}, 1, ("= 4 processes, and 1 runs", "--nproc 4", "sizes whose product is 1")),
        ({"pp_size": 10**5000}, 2, ("sizes whose product is 2",)),
    ],
)
def test_another_number_of_processes_says_what_to_set(sizes: dict[str, int], number: int, words: list[str]) -> None:
    run = parse_config({"model": {"name": "qwen3-tiny"}, "data": {"path": ["a.txt"]}})
    with pytest.raises(ConfigError) as refused:
        refuse_other_number(run.model_copy(update={"parallel": ParallelConfig(**sizes)}), number)
    assert all(each in str(refused.value) for each in words), refused.value


def test_the_world_is_the_product_of_all_but_the_experts() -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 6, "tp_size": 5, "pp_size": 7, "ep_size": 3}
    assert ParallelConfig(**sizes).world_size == 2 * 6 * 5 * 7
    assert ParallelConfig().world_size == 1


def layout(schedule: str, pp_size: int, layers: list[int] | None = None) -> ParallelConfig:
    return ParallelConfig.model_validate({"pp_schedule": schedule, "pp_size": pp_size, "pp_layers": layers})


@pytest.mark.parametrize(
    ("parallel", "stages"),
    [
        (layout("GPipe", 3), 3),
        (layout("1F1B", 3), 3),
        (layout("Interleaved1F1B", 3), 6),
        (layout("Interleaved1F1B", 2, [1] * 6), 6),
        (layout("LoopedBFS", 2, [1] * 8), 8),
        (layout("ZBVZeroBubble", 3), 6),
        (layout("DualPipeV", 2, [1] * 4), 4),
        *((layout(schedule, 1, [1, 1]), 1) for schedule in SCHEDULES),
    ],
)
def test_the_number_of_stages(parallel: ParallelConfig, stages: int) -> None:
    assert num_stages(parallel) == stages


@pytest.mark.parametrize(
    ("parallel", "layers", "expected"),
    [
        (layout("1F1B", 1), 4, ((0, 4),)),
        (layout("1F1B", 2), 4, ((0, 2), (2, 4))),
        (layout("1F1B", 3), 8, ((0, 3), (3, 6), (6, 8))),
        (layout("1F1B", 2, [1, 3]), 4, ((0, 1), (1, 4))),
        (layout("ZBVZeroBubble", 2), 5, ((0, 2), (2, 3), (3, 4), (4, 5))),
        (layout("1F1B", 1, [9]), 4, ((0, 4),)),
    ],
)
def test_the_layers_of_stages(parallel: ParallelConfig, layers: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert layers_of_stages(parallel, layers) == expected


@pytest.mark.parametrize(
    ("parallel", "layers", "words"),
    [
        (layout("1F1B", 5), 4, "4 layers cannot be cut into 5 stages"),
        (layout("1F1B", 2, [1, 3]), 5, "5 layers cannot be cut into 2 stages of [1, 3] layers"),
        (layout("LoopedBFS", 2, [1, 3]), 4, "4 layers cannot be cut into 4 stages of [1, 3] layers"),
    ],
)
def test_layers_that_cannot_be_cut_that_way(parallel: ParallelConfig, layers: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of_stages(parallel, layers)
    (fault,) = caught.value.faults
    assert fault.problem == words


@given(st.sampled_from(SCHEDULES), st.integers(1, 12), st.integers(0, 100))
def test_an_even_cut_covers_all_layers_once_and_in_order(schedule: str, pp_size: int, more: int) -> None:
    parallel = layout(schedule, pp_size)
    num_layers = num_stages(parallel) + more
    cut = layers_of_stages(parallel, num_layers)
    assert [layer for start, end in cut for layer in range(start, end)] == list(range(num_layers))
    sizes = [end - start for start, end in cut]
    assert len(sizes) == num_stages(parallel)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(st.integers(2, 6), st.lists(st.integers(1, 9), min_size=4, max_size=30))
def test_an_uneven_cut_is_the_one_given(pp_size: int, counts: list[int]) -> None:
    counts = counts[: len(counts) // pp_size * pp_size]
    if len(counts) < 2 * pp_size:
        return
    cut = layers_of_stages(layout("Interleaved1F1B", pp_size, counts), sum(counts))
    assert [end - start for start, end in cut] == counts
    assert [layer for start, end in cut for layer in range(start, end)] == list(range(sum(counts)))


@given(st.sampled_from(SCHEDULES), st.integers(1, 12), st.integers(2, 4))
def test_each_stage_runs_on_one_rank(schedule: str, pp_size: int, each: int) -> None:
    fixed = schedule in (*SINGLE_STAGE_SCHEDULES, *V_SCHEDULES)
    parallel = layout(schedule, pp_size, None if fixed else [1] * (pp_size * each))
    ranks = [stages_of_rank(parallel, rank) for rank in range(pp_size)]
    assert sorted(stage for stages in ranks for stage in stages) == list(range(num_stages(parallel)))
    assert all(list(stages) == sorted(stages) and len(stages) == stages_per_rank(parallel) for stages in ranks)


def torchs_schedule(parallel: ParallelConfig, rank: int, microbatches: int) -> Any:
    """torch's own schedule object over stages that hold nothing; raises its `ValueError` for numbers it cannot run."""
    total, last = num_stages(parallel), num_stages(parallel) - 1
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=total,
            group_rank=rank,
            group_size=parallel.pp_size,
            is_first=stage == 0,
            is_last=stage == last,
            submod=None,
            has_backward=True,
            device="cpu",
        )
        for stage in stages_of_rank(parallel, rank)
    ]
    schedule: Any = get_schedule_class(parallel.pp_schedule)
    first = stages[0] if parallel.pp_schedule in SINGLE_STAGE_SCHEDULES else stages
    return schedule(first, microbatches, loss_fn=lambda output, target: output)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rules_allow_the_micro_batches_that_torch_runs(schedule: str) -> None:
    for pp_size in (2, 3, 4):
        for microbatches in range(1, 14):
            parallel = f"pp_size: {pp_size}, pp_schedule: {schedule}, pp_microbatches: {microbatches}"
            text = run_text(parallel, TWELVE_LAYERS, train=f"micro_batch_size: {microbatches}")
            try:
                torchs_schedule(layout(schedule, pp_size), 0, microbatches)
            except ValueError:
                assert [fault.path for fault in faults_of(text)] == [PIECES]
            else:
                assert parse_config(text).parallel.pp_microbatches == microbatches


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in SINGLE_STAGE_SCHEDULES])
def test_stages_run_on_the_ranks_where_torch_runs_them(schedule: str) -> None:
    for pp_size in (2, 3, 4):
        parallel = layout(schedule, pp_size)
        ranks = torchs_schedule(parallel, 0, 4 * pp_size).stage_index_to_group_rank
        for rank in range(pp_size):
            assert stages_of_rank(parallel, rank) == tuple(stage for stage, on in sorted(ranks.items()) if on == rank)


@pytest.mark.parametrize("config_class", [Qwen3Config, Qwen3MoeConfig])
def test_defaults_are_those_of_the_configuration_class(config_class: type[Any]) -> None:
    known, defaults = ModelConfig(config={"model_type": config_class.model_type}), config_class()
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
    if config_class is Qwen3MoeConfig:
        names += ["num_experts", "decoder_sparse_step"]
        assert router_loss_share(known) == defaults.router_aux_loss_coef
        assert not defaults.mlp_only_layers
    for name in names:
        assert size(known, name) == getattr(defaults, name)
    assert is_tied(known) == defaults.tie_word_embeddings
    assert (is_dense(known), is_moe(known)) == (config_class is Qwen3Config, config_class is Qwen3MoeConfig)


@pytest.mark.parametrize("value", [True, 0, -3, 4.0, "4", None, 2**63, [4]])
def test_what_is_no_size_is_not_known(value: object) -> None:
    assert size(ModelConfig(name="qwen3-tiny", config={"hidden_size": value}), "hidden_size") is None


def test_a_model_type_that_is_no_text_is_not_known() -> None:
    assert size(ModelConfig(config={"model_type": HUGE}), "hidden_size") is None


@pytest.mark.parametrize("value", ["0.1", None, 10**400, -1, float("nan")])
def test_what_is_no_share_of_the_loss_is_not_known(value: object) -> None:
    assert router_loss_share(ModelConfig(name="qwen3-moe-tiny", config={"router_aux_loss_coef": value})) == 0.0


def test_transformers_writes_the_number_of_experts_under_a_name_we_read(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_experts=6).save_pretrained(tmp_path)
    assert "experts" in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert size(ModelConfig(path=tmp_path), "num_experts") == 6
