"""Training steps of tiny models in each layout, run by real processes, and the same steps by one process alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from planned_runs import Step, gradients_of, tiny_qwen3
from process_groups import Collectives
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from actmem import Action, Plan, Rule
from actmem.parallel import Mesh, MeshSizes, build_mesh, clip_gradients, lay_out_model, shard_data, shard_tensors
from actmem.parallel.pipeline import cut
from actmem.runtime import Applied, apply

NUM_STEPS = 2
GRAD_LIMIT = 0.5
SEQUENCES, LENGTH = 2, 16  # of a rank with data of its own


@dataclass(frozen=True)
class Case:
    """A model family in a layout; `fields` are further ones of the model's configuration, `idle`: all tokens go to the
    same experts, `staged`: the layers are cut into two stages first, as for a pipeline."""

    family: str
    sizes: MeshSizes
    fields: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = False
    loss_parallel: bool = False
    idle: bool = False
    staged: bool = False
    mixture: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixture", self.family != "dense")

    @property
    def data_size(self) -> int:
        return self.sizes.dp_replicate_size * self.sizes.dp_shard_size


DDP, FSDP2, TP = MeshSizes(dp_replicate_size=2), MeshSizes(dp_shard_size=2), MeshSizes(tp_size=2)
EP = MeshSizes(dp_shard_size=2, ep_size=2)
HSDP = replace(DDP, dp_shard_size=2)
ODD = {"tie_word_embeddings": True, "vocab_size": 65, "pad_token_id": 40, "attention_bias": True}

CASES: dict[int, dict[str, Case]] = {
    2: {
        "ddp": Case("dense", DDP),
        "ddp-moe": Case("grouped_mm", DDP),
        "fsdp2": Case("dense", FSDP2),
        "fsdp2-moe": Case("grouped_mm", FSDP2),
        "tp": Case("dense", TP),
        "tp-moe": Case("grouped_mm", TP),
        "tp-moe-batched": Case("batched_mm", TP),
        "tp-moe-eager": Case("eager", TP),
        "tp-moe-idle": Case("eager", TP, idle=True),
        "tp-odd": Case("dense", TP, ODD, sequence_parallel=True),
        "tp-sp": Case("dense", TP, sequence_parallel=True),
        "tp-sp-staged": Case("dense", TP, sequence_parallel=True, staged=True),
        "tp-sp-moe": Case("grouped_mm", TP, sequence_parallel=True),
        "tp-loss": Case("dense", TP, loss_parallel=True),
        "tp-sp-loss-moe": Case("grouped_mm", TP, sequence_parallel=True, loss_parallel=True),
        "ep": Case("grouped_mm", EP),
        "ep-batched": Case("batched_mm", EP),
        "ep-eager": Case("eager", EP),
        "ep-idle": Case("grouped_mm", EP, idle=True),
        "ep-eager-idle": Case("eager", EP, idle=True),
    },
    4: {
        "hsdp": Case("dense", HSDP),
        "hsdp-moe": Case("grouped_mm", HSDP),
        "fsdp2-tp": Case("dense", replace(FSDP2, tp_size=2)),
        "fsdp2-tp-sp-loss": Case("dense", replace(FSDP2, tp_size=2), sequence_parallel=True, loss_parallel=True),
        "fsdp2-tp-moe": Case("grouped_mm", replace(FSDP2, tp_size=2)),
        "ddp-tp": Case("dense", replace(DDP, tp_size=2)),
        "fsdp2-ep": Case("grouped_mm", MeshSizes(dp_shard_size=4, ep_size=2)),
        "fsdp2-ep-eager": Case("eager", MeshSizes(dp_shard_size=4, ep_size=2)),
        "hsdp-ep": Case("grouped_mm", replace(HSDP, ep_size=2)),
    },
}

MIXED = Plan(
    "mixed",
    (Rule(".*", Action.RECOMPUTE), Rule("self_attn.*", Action.SWAP), Rule("(mlp|mlp.experts).mul.*", Action.SAVE)),
)
PLANS: dict[str, str | Plan] = {
    "selective": "selective",
    "full": "full",
    "attention-swap": "attention-swap",
    "mixed": MIXED,
}
LATE = "full, applied last"
PLANNED_LAST = ("ddp", "fsdp2", "tp-sp", "ep", "fsdp2-tp-moe", "fsdp2-ep-eager")
MEMORY = {"tier": "disk", "min_swap_bytes": 0}


@dataclass(frozen=True)
class Outcome:
    """What came of a case on one rank: its steps with gradients as the rank holds them, the order of collectives in
    each, bytes that the plan recomputed and swapped; without a plan also the `whole` losses and gradients of all ranks,
    and the norm before and the gradients after clipping."""

    steps: list[Step]
    collectives: list[list[str]]
    dropped_bytes: int = 0
    num_swapped: int = 0
    whole: list[Step] = field(default_factory=list)
    norm: float = 0.0
    clipped: dict[str, Tensor] = field(default_factory=dict)


def build(case: Case) -> Any:
    """The case's model, whole; the same on all ranks."""
    fields = case.fields | ({"output_router_logits": True} if case.mixture else {})
    model: Any = tiny_qwen3(case.family, **fields)
    if case.idle:
        for layer in model.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight)  # all experts score alike, so the choice is the same for all tokens
    return model


class Staged(nn.Module):
    """A model as two stages, one after the other. Parameters have the names that they have in the whole model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleList([cut(model, 0, 1), cut(model, 1, 2)])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages:
            yield from stage.model.named_parameters()

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        states = input_ids
        for stage in self.stages:
            states = stage(states)
        return SimpleNamespace(logits=self.stages[-1].model.lm_head(states))


def lay_out(case: Case, model: Any, mesh: Mesh, apply_plan: Any) -> tuple[nn.Module, Applied | None]:
    """`lay_out_model`, or the same for stages, whose tensors are cut one stage at a time."""
    options = {"sequence_parallel": case.sequence_parallel, "loss_parallel": case.loss_parallel}
    if not case.staged:
        return lay_out_model(model, mesh, apply_plan, **options)
    for stage in model.stages:
        shard_tensors(stage, mesh, **options)
    return model, apply_plan(model)


def loss_of(case: Case, module: nn.Module, step: int, part: int) -> Tensor:
    """The share of one part of the data in the loss of a step, that of the routers included."""
    count = SEQUENCES * case.data_size
    tokens = torch.randint(0, 64, (count, LENGTH + 1), generator=torch.Generator().manual_seed(40 + step))
    mine = tokens[part * SEQUENCES : (part + 1) * SEQUENCES]
    out = module(input_ids=mine[:, :-1].contiguous(), use_cache=False)
    targets = mine[:, 1:].flatten()
    loss = functional.cross_entropy(out.logits.flatten(0, 1).float(), targets, reduction="sum") / (count * LENGTH)
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    if case.mixture:
        loss = loss + 0.1 * load_balancing_loss_func(out.router_logits, 4, 2) / case.data_size
    return loss


def run_alone(case: Case) -> Outcome:
    """All parts of the data one after the other on the whole model: what every layout must come to."""
    model = build(case)
    steps = []
    for step in range(NUM_STEPS):
        model.zero_grad(set_to_none=True)
        losses = [loss_of(case, model, step, part) for part in range(case.data_size)]
        torch.stack(losses).sum().backward()
        steps.append(Step(torch.stack(losses).sum().detach(), gradients_of(model)))
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), GRAD_LIMIT))
    return Outcome([], [], whole=steps, norm=norm, clipped=gradients_of(model))


def run_on_rank(case: Case, plan: str | Plan | None, *, late: bool = False) -> Outcome:
    """This rank's part of the case, laid out, under a plan; `late`: one that comes after all else."""
    mesh = build_mesh(case.sizes, "cpu")
    model = Staged(build(case)) if case.staged else build(case)

    def apply_plan(model: nn.Module) -> Applied | None:
        return None if plan is None or late else apply(model, plan, memory=MEMORY)

    module, applied = lay_out(case, model, mesh, apply_plan)
    if late and plan is not None:
        applied = apply(module, plan, memory=MEMORY)
    steps, collectives, whole = [], [], []
    for step in range(NUM_STEPS):
        model.zero_grad(set_to_none=True)
        with _loss_context(case), Collectives() as seen:
            loss = loss_of(case, module, step, mesh.data_rank)
            loss.backward()
        collectives.append(seen.order)
        steps.append(Step(loss.detach().clone(), {name: _local(each) for name, each in gradients_of(model).items()}))
        if plan is None:
            total = loss.detach().clone()
            for group in mesh.data_groups:
                distributed.all_reduce(total, group=group)
            whole.append(Step(total, _whole(model)))
    if applied is not None:
        stats = applied.stats
        applied.remove()
        return Outcome(steps, collectives, stats.dropped_bytes, stats.swap.num_begun)
    norm = clip_gradients(model.parameters(), GRAD_LIMIT, mesh)
    return Outcome(steps, collectives, whole=whole, norm=norm, clipped=_whole(model))


def _loss_context(case: Case) -> AbstractContextManager[Any]:
    return loss_parallel() if case.loss_parallel else nullcontext()


def _local(gradient: Tensor) -> Tensor:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """All gradients, gathered. Each is placed as its parameter is, which an optimizer counts on."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements, name
            gradient = gradient.full_tensor()
        found[name] = gradient.detach().clone()
    return found


def refusals() -> dict[str, str]:
    """What is said to models in the wrong order or layout; ``""`` where nothing is."""
    mesh, tensors, experts, copies = (build_mesh(sizes, "cpu") for sizes in (FSDP2, TP, EP, DDP))
    dense = Case("dense", MeshSizes())
    planned, sharded, cut = build(dense), build(dense), build(dense)
    applied = apply(planned, "full")
    shard_data(sharded, mesh)
    shard_tensors(cut, tensors)
    said = {
        "tensors after a plan": _said(shard_tensors, planned, tensors),
        "tensors after data": _said(shard_tensors, sharded, tensors),
        "tensors twice": _said(shard_tensors, cut, tensors),
        "data twice": _said(shard_data, sharded, mesh),
        "copies twice": _said(shard_data, shard_data(build(dense), copies), copies),
        "experts of a dense model": _said(shard_tensors, build(dense), experts),
        "uneven heads": _said(shard_tensors, build(replace(dense, fields={"num_key_value_heads": 1})), tensors),
        "uneven experts": _said(shard_tensors, build(Case("eager", EP, {"num_experts": 5})), experts),
        "another model": _said(shard_tensors, _another_model(), tensors),
        "too few ranks": _said(build_mesh, MeshSizes(dp_shard_size=3), "cpu"),
    }
    applied.remove()
    return said


def _another_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    return LlamaForCausalLM(config)


def _said(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def work(rank: int, num_ranks: int, directory: Path) -> None:
    """All cases of this many ranks in one group of processes; each leaves what came of them in a file."""
    logging.disable(logging.WARNING)
    results: dict[Any, Any] = {"refusals": _caught(refusals)} if num_ranks == 2 else {}
    for name, case in CASES[num_ranks].items():
        results[name, "none"] = _caught(run_on_rank, case, None)
        for plan_name, plan in PLANS.items():
            results[name, plan_name] = _caught(run_on_rank, case, plan)
        if name in PLANNED_LAST:
            results[name, LATE] = _caught(functools.partial(run_on_rank, late=True), case, "full")
    torch.save(results, directory / f"{num_ranks}-{rank}")


def _caught(function: Any, *args: Any) -> Any:
    """An error is a result too; all ranks run into it alike, so none waits for the others."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
