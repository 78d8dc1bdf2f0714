"""The rules of the section `parallel`: which sizes divide which of the model's, and what a pipeline needs.

Rules that ask for a size of the model are silent where it is not known before the model is built. Those of a pipeline
hold where there is one, with `pp_size` above 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from actmem.config.complaint import Complaint, Rule
from actmem.config.schema import ParallelConfig, RunConfig
from actmem.config.shown import shown
from actmem.config.sizes import (
    is_dense,
    is_moe,
    is_tied,
    num_layers,
    router_loss_share,
    size,
    sizes_cut_by_tensor_parallel,
    vocab_size,
)
from actmem.config.stages import SINGLE_STAGE_SCHEDULES, V_SCHEDULES, num_stages, stages_per_rank

TP, EP, PP = "parallel.tp_size", "parallel.ep_size", "parallel.pp_size"
SEQUENCE, LOSS = "parallel.sequence_parallel", "parallel.loss_parallel"
SCHEDULE, MICROBATCHES, STAGE_LAYERS = "parallel.pp_schedule", "parallel.pp_microbatches", "parallel.pp_layers"
_MODEL = ("model.name", "model.path", "model.config")
_AS_MANY_AS_STAGES = ("1F1B", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")


def _tp_divides_model(config: RunConfig) -> Iterator[Complaint]:
    tp, sizes = config.parallel.tp_size, sizes_cut_by_tensor_parallel(config.model)
    undivided = [f"{name} {value}" for name, value in sizes.items() if value % tp]
    if undivided:
        allowed = f"divisors of {gcd(*sizes.values())}, the greatest common one of {', '.join(sizes)}"
        yield Complaint(TP, f"{shown(tp)} does not divide {', '.join(undivided)}", tp, allowed)


def _tp_divides_vocabulary(config: RunConfig) -> Iterator[Complaint]:
    tp, vocabulary = config.parallel.tp_size, vocab_size(config)
    if config.parallel.loss_parallel and vocabulary is not None and vocabulary % tp:
        problem = f"true needs equal parts of the vocabulary of {shown(vocabulary)} on {shown(tp)} ranks"
        yield Complaint(LOSS, problem, True, f"false, or a vocabulary that {TP} divides")


def _loss_parallel_or_chunked(config: RunConfig) -> Iterator[Complaint]:
    if config.parallel.loss_parallel and config.model.loss == "chunked":
        problem = "is given beside model.loss: chunked, which needs whole logits"
        yield Complaint(LOSS, problem, True, "false, or model.loss: standard")


def _tp_divides_sequence(config: RunConfig) -> Iterator[Complaint]:
    tp, length = config.parallel.tp_size, config.data.sequence_length
    if config.parallel.sequence_parallel and length % tp:
        problem = f"true needs equal parts of data.sequence_length {shown(length)} on {shown(tp)} ranks"
        yield Complaint(SEQUENCE, problem, True, f"false, or a data.sequence_length that {TP} divides")


def _ep_has_experts(config: RunConfig) -> Iterator[Complaint]:
    ep = config.parallel.ep_size
    if ep > 1 and is_dense(config.model):
        problem = f"{shown(ep)} ranks would share experts, and the model is dense: it has none"
        yield Complaint(EP, problem, ep, "1, or a mixture of experts")


def _ep_divides_experts(config: RunConfig) -> Iterator[Complaint]:
    ep = config.parallel.ep_size
    experts = size(config.model, "num_experts") if is_moe(config.model) else None
    if experts is not None and experts % ep:
        yield Complaint(EP, f"{shown(ep)} does not divide num_experts {experts}", ep, f"divisors of {experts}")


def _ep_divides_shards(config: RunConfig) -> Iterator[Complaint]:
    ep, shards = config.parallel.ep_size, config.parallel.dp_shard_size
    if shards % ep:
        problem = f"{shown(ep)} does not divide parallel.dp_shard_size {shown(shards)}, whose ranks share the experts"
        yield Complaint(EP, problem, ep, f"divisors of {shown(shards)}")


def _tp_or_ep(config: RunConfig) -> Iterator[Complaint]:
    tp, ep = config.parallel.tp_size, config.parallel.ep_size
    if tp > 1 and ep > 1:
        problem = f"is given beside {TP}: {shown(tp)}, which spreads the experts over its own ranks"
        yield Complaint(EP, problem, ep, f"1, or {TP}: 1")


def _stages_have_layers(config: RunConfig) -> Iterator[Complaint]:
    parallel, layers = config.parallel, num_layers(config.model)
    if not _is_pipeline(parallel) or parallel.pp_layers is not None or layers is None:
        return
    if num_stages(parallel) > layers:
        each = stages_per_rank(parallel)
        problem = f"{shown(parallel.pp_size)} ranks with {each} of {parallel.pp_schedule}'s stages each"
        problem += f" need {shown(num_stages(parallel))} layers; the model has {layers}"
        yield Complaint(PP, problem, parallel.pp_size, f"at most {max(1, layers // each)}")


def _stage_layers_sum(config: RunConfig) -> Iterator[Complaint]:
    parallel, layers = config.parallel, num_layers(config.model)
    if _is_pipeline(parallel) and parallel.pp_layers is not None and layers not in (None, sum(parallel.pp_layers)):
        problem = f"{shown(parallel.pp_layers)} are {shown(sum(parallel.pp_layers))} layers; the model has {layers}"
        yield Complaint(STAGE_LAYERS, problem, parallel.pp_layers, f"layers of each stage, {layers} in all")


def _stage_layers_length(config: RunConfig) -> Iterator[Complaint]:
    parallel, given = config.parallel, config.parallel.pp_layers
    if not _is_pipeline(parallel) or given is None or len(given) == num_stages(parallel):
        return
    each = 1 if parallel.pp_schedule in SINGLE_STAGE_SCHEDULES else 2
    allowed = f"a number for each of the {shown(each * parallel.pp_size)} stages"
    if parallel.pp_schedule not in (*SINGLE_STAGE_SCHEDULES, *V_SCHEDULES):
        allowed = f"a multiple of {shown(parallel.pp_size)} numbers, at least {shown(2 * parallel.pp_size)}"
    problem = f"has {len(given)} entries, for {parallel.pp_schedule} on {shown(parallel.pp_size)} ranks"
    yield Complaint(STAGE_LAYERS, problem, given, allowed)


def _microbatches_divide_batch(config: RunConfig) -> Iterator[Complaint]:
    pieces, batch = config.parallel.pp_microbatches, config.train.micro_batch_size
    if _is_pipeline(config.parallel) and batch % pieces:
        problem = f"{shown(pieces)} does not divide train.micro_batch_size {shown(batch)}"
        yield Complaint(MICROBATCHES, problem, pieces, f"divisors of {shown(batch)}")


def _microbatches_fill_stages(config: RunConfig) -> Iterator[Complaint]:
    parallel, pieces = config.parallel, config.parallel.pp_microbatches
    if not _is_pipeline(parallel) or parallel.pp_schedule not in _AS_MANY_AS_STAGES:
        return
    if pieces < num_stages(parallel):
        problem = f"{shown(pieces)} are fewer than the {shown(num_stages(parallel))} stages of {parallel.pp_schedule}"
        yield Complaint(MICROBATCHES, problem, pieces, f"at least {shown(num_stages(parallel))}")


def _microbatches_fill_rounds(config: RunConfig) -> Iterator[Complaint]:
    parallel, pieces = config.parallel, config.parallel.pp_microbatches
    rounds = max(1, pieces // parallel.pp_size)
    if _is_pipeline(parallel) and parallel.pp_schedule in _IN_ROUNDS and pieces % rounds:
        below = pieces - pieces % parallel.pp_size
        problem = f"{shown(pieces)} do not fill the {shown(rounds)} rounds of {parallel.pp_schedule}"
        problem += f" on {shown(parallel.pp_size)} ranks"
        allowed = f"multiples of {shown(parallel.pp_size)}, such as {shown(below)} or {shown(below + parallel.pp_size)}"
        yield Complaint(MICROBATCHES, problem, pieces, allowed)


def _untied(config: RunConfig) -> Iterator[Complaint]:
    if _is_pipeline(config.parallel) and is_tied(config.model):
        problem = "the first and the last stage would share a weight: the model has tie_word_embeddings"
        yield Complaint(PP, problem, config.parallel.pp_size, "1, or a model with tie_word_embeddings: false")


def _no_router_loss(config: RunConfig) -> Iterator[Complaint]:
    share = router_loss_share(config.model)
    if _is_pipeline(config.parallel) and share:
        problem = f"the router's auxiliary loss (router_aux_loss_coef {share:g}) needs all layers on one rank"
        yield Complaint(PP, problem, config.parallel.pp_size, "1, or a model with router_aux_loss_coef: 0")


def _no_accumulation(config: RunConfig) -> Iterator[Complaint]:
    batches = config.train.grad_accumulation
    if _is_pipeline(config.parallel) and batches > 1:
        problem = f"{shown(batches)} steps are accumulated beside {PP}: {shown(config.parallel.pp_size)}"
        yield Complaint("train.grad_accumulation", problem, batches, f"1, with more {MICROBATCHES}")


def _is_pipeline(parallel: ParallelConfig) -> bool:
    return parallel.pp_size > 1


def _whole_head_or_standard(config: RunConfig) -> Iterator[Complaint]:
    if config.parallel.tp_size > 1 and config.model.loss == "chunked":
        problem = f"chunked needs the whole head on each rank, and {TP} {shown(config.parallel.tp_size)} cuts it"
        yield Complaint("model.loss", problem, "chunked", f"standard, or {TP}: 1")


PARALLEL_RULES = (
    Rule((TP, "model.loss"), _whole_head_or_standard),
    Rule((TP, *_MODEL), _tp_divides_model),
    Rule((TP, LOSS, "data.vocab_size", "data.tokenizer", *_MODEL), _tp_divides_vocabulary),
    Rule((LOSS, "model.loss"), _loss_parallel_or_chunked),
    Rule((TP, SEQUENCE, "data.sequence_length"), _tp_divides_sequence),
    Rule((EP, *_MODEL), _ep_has_experts),
    Rule((EP, *_MODEL), _ep_divides_experts),
    Rule((EP, "parallel.dp_shard_size"), _ep_divides_shards),
    Rule((EP, TP), _tp_or_ep),
    Rule((PP, SCHEDULE, STAGE_LAYERS, *_MODEL), _stages_have_layers),
    Rule((PP, STAGE_LAYERS, *_MODEL), _stage_layers_sum),
    Rule((PP, SCHEDULE, STAGE_LAYERS), _stage_layers_length),
    Rule((PP, MICROBATCHES, "train.micro_batch_size"), _microbatches_divide_batch),
    Rule((PP, SCHEDULE, MICROBATCHES), _microbatches_fill_stages),
    Rule((PP, SCHEDULE, MICROBATCHES), _microbatches_fill_rounds),
    Rule((PP, *_MODEL), _untied),
    Rule((PP, *_MODEL), _no_router_loss),
    Rule((PP, "train.grad_accumulation"), _no_accumulation),
)
