"""Two processes: data parallel, sharded and tensor parallel training: the same bits, and not one collective more."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import (
    Step,
    assert_same_steps,
    gradients_of,
    language_loss,
    tiny_qwen3,
    token_batch,
)
from process_groups import Collectives, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from actmem import Action, Plan, Rule
from actmem.runtime import NoEffectWarning, apply

WORLD_SIZE = 2
POLICIES = ("none", "full", "mlp", "selective")
Wrap = Callable[[nn.Module], nn.Module]


def data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def data_parallel_static_graph(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def data_parallel_unused_parameters(model: nn.Module) -> nn.Module:
    model.unused = nn.Linear(4, 4)
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def sharded_and_kept(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    return fully_shard(model)


def sharded_by_parts(model: nn.Module) -> nn.Module:
    """Parameters come and go inside a region too: with attention and feed-forward part, or stay with one projection."""
    for layer in model.model.layers:
        fully_shard(layer.self_attn)
        fully_shard(layer.mlp.gate_proj, reshard_after_forward=False)
        fully_shard(layer.mlp)
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        plan = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


def tensor_parallel_between_modules(model: nn.Module) -> nn.Module:
    """DTensors flow from projection to projection, and leave the feed-forward part sharded along the sequence."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        plan = {
            "mlp": PrepareModuleInputOutput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Replicate(),),
                output_layouts=(Shard(1),),
                desired_output_layouts=(Replicate(),),
            ),
            "mlp.gate_proj": ColwiseParallel(use_local_output=False),
            "mlp.up_proj": ColwiseParallel(use_local_output=False),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
    return model


def sequence_parallel(model: nn.Module) -> nn.Module:
    """Attention and feed-forward part are given shards of the sequence, which they gather, and return shards."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    to_shards = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    for layer in model.model.layers:
        plan = {
            "input_layernorm": to_shards,
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "post_attention_layernorm": to_shards,
            "mlp": PrepareModuleInputOutput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
                output_layouts=(Shard(1),),
                desired_output_layouts=(Replicate(),),
            ),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    return model


FEW = ("full", "selective")
GATHER_AGAIN = Rule(".*all_gather", Action.RECOMPUTE, reach="communication")
AGAIN = {
    "gather-again": Plan("gather-again", (GATHER_AGAIN,)),
    "all-and-gather-again": Plan("all-and-gather-again", (Rule(".*", Action.RECOMPUTE), GATHER_AGAIN)),
}
CASES: dict[Wrap, tuple[str, ...]] = {
    data_parallel: POLICIES,
    data_parallel_static_graph: FEW,
    data_parallel_unused_parameters: FEW,
    sharded: POLICIES,
    sharded_and_kept: FEW,
    sharded_by_parts: POLICIES,
    tensor_parallel: POLICIES,
    tensor_parallel_between_modules: FEW,
    sequence_parallel: FEW,
}


def whole(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()}


def steps_of(
    wrap: Wrap, policy: str | Plan | None, rank: int
) -> tuple[list[Step], list[dict[str, int]], dict[str, Any]]:
    model = wrap(tiny_qwen3())
    applied = apply(model, policy, memory={"verify": "always"}) if policy is not None else None
    steps, counts, order, said = [], [], [], []
    for number in range(2):
        model.zero_grad(set_to_none=True)
        with Collectives() as below, CommDebugMode() as above, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NoEffectWarning)
            loss = language_loss(token_batch(2 * number + rank))(model)
            loss.backward()
        said += [str(each.message) for each in caught if each.category is NoEffectWarning]
        order.append(below.order)
        counts.append(Counter(below.order) | {str(op): count for op, count in above.get_comm_counts().items()})
        steps.append(Step(loss.detach().clone(), whole(gradients_of(model))))
    facts: dict[str, Any] = {"order": order, "said": said}
    if applied is not None:
        facts |= {
            "dropped": applied.stats.dropped_bytes,
            "replayed": applied.stats.num_replayed_ops,
            "held": applied.stats.regions[0].held_bytes_by_reason,
        }
        applied.remove()
    if isinstance(model, FSDPModule):
        model.reshard()
    return steps, counts, facts


def accumulate_without_sync(policy: str | None, rank: int) -> list[Step]:
    """Gradient accumulation with DDP's `no_sync`, the last backward synchronised."""
    model = data_parallel(tiny_qwen3())
    applied = apply(model, policy, memory={"verify": "always"}) if policy is not None else None
    steps = []
    for number in range(2):
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            language_loss(token_batch(10 * number + rank))(model).backward()
        loss = language_loss(token_batch(10 * number + 5 + rank))(model)
        loss.backward()
        steps.append(Step(loss.detach().clone(), gradients_of(model)))
    if applied is not None:
        applied.remove()
    return steps


def work(rank: int, directory: Path) -> None:
    """All of it in one pair of processes; what comes of each case is left in a file."""
    for wrap, policies in CASES.items():
        for policy in (None, *policies):
            save(steps_of, directory, f"{wrap.__name__}-{policy}-{rank}", wrap, policy, rank)
    for name, plan in AGAIN.items():
        save(steps_of, directory, f"sequence_parallel-{name}-{rank}", sequence_parallel, plan, rank)
    for policy in (None, *FEW):
        save(accumulate_without_sync, directory, f"accumulation-{policy}-{rank}", policy, rank)


def save(run: Callable[..., Any], directory: Path, name: str, *args: Any) -> None:
    """An error is a result too; both ranks run into it alike, so neither waits for the other."""
    try:
        result = run(*args)
    except Exception as error:  # noqa: BLE001
        result = f"{type(error).__name__}: {error}"
    torch.save(result, directory / name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """One pair of processes for all tests."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(work, WORLD_SIZE, directory)

    def read(name: str) -> Any:
        result = torch.load(directory / name, weights_only=False)
        if isinstance(result, str):
            pytest.fail(f"{name}: {result}")
        return result

    return read


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("wrap", "policy"),
    [pytest.param(wrap, each, id=f"{wrap.__name__}-{each}") for wrap, policies in CASES.items() for each in policies],
)
def test_invariant_01_same_numbers_and_no_collective_more(
    results: Callable[[str], Any], wrap: Wrap, policy: str
) -> None:
    for rank in range(WORLD_SIZE):
        expected, expected_counts, _ = results(f"{wrap.__name__}-None-{rank}")
        steps, counts, facts = results(f"{wrap.__name__}-{policy}-{rank}")
        assert_same_steps(steps, expected, f"rank {rank}")
        assert any(expected_counts), "nothing was communicated"
        assert counts == expected_counts
        assert (facts["dropped"] > 0) == (policy != "none")
        assert (facts["replayed"] > 0) == (policy != "none")


@pytest.mark.parametrize("policy", FEW)
def test_invariant_05_accumulation_without_synchronisation(results: Callable[[str], Any], policy: str) -> None:
    for rank in range(WORLD_SIZE):
        assert_same_steps(
            results(f"accumulation-{policy}-{rank}"), results(f"accumulation-None-{rank}"), f"rank {rank}"
        )


def test_invariant_08_unsharded_parameters_are_not_held(results: Callable[[str], Any]) -> None:
    """FSDP2 frees them after the forward; holding them would undo the sharding."""
    _, _, facts = results("sharded-full-0")
    hidden_bytes, rotary_bytes = 2 * 16 * 32 * 4, 2 * 16 * 8 * 4
    assert facts["held"] == {"input": hidden_bytes + rotary_bytes}


def test_invariant_08_parameters_gathered_inside_a_region_are_not_held(results: Callable[[str], Any]) -> None:
    """Nor is anything made from them once their module is done: what leaves the module is held instead."""
    _, _, facts = results("sharded_by_parts-full-0")
    hidden_bytes, inner_bytes, rotary_bytes = 2 * 16 * 32 * 4, 2 * 16 * 48 * 4, 2 * 16 * 8 * 4
    assert facts["held"] == {
        "input": hidden_bytes + rotary_bytes,
        "leaves a module that FSDP2 shards by itself": hidden_bytes + inner_bytes,
    }


def test_invariant_09_what_was_communicated_is_kept(results: Callable[[str], Any]) -> None:
    """A replay must not call the other ranks unless a plan asks for it."""
    _, _, facts = results("tensor_parallel-full-0")
    assert facts["held"]["communication"] > 0


@pytest.mark.parametrize("name", AGAIN)
def test_collectives_that_a_plan_names_are_issued_once_more(results: Callable[[str], Any], name: str) -> None:
    """The two that gather what attention and the feed-forward part read, in each of two layers; and none besides."""
    gather = "_c10d_functional.all_gather_into_tensor.default"
    orders = []
    for rank in range(WORLD_SIZE):
        expected, expected_counts, _ = results(f"sequence_parallel-None-{rank}")
        steps, counts, facts = results(f"sequence_parallel-{name}-{rank}")
        assert_same_steps(steps, expected, f"rank {rank}")
        for mine, theirs in zip(counts, expected_counts, strict=True):
            more = {op: count - theirs[op] for op, count in mine.items()}
            assert {op for op, count in more.items() if count} == {gather, "c10d_functional.all_gather_into_tensor"}
            assert more[gather] == 4
        assert not facts["said"]
        orders.append(facts["order"])
    assert orders[0] == orders[1]


def test_what_is_gathered_is_held_unless_a_plan_says_otherwise(results: Callable[[str], Any]) -> None:
    _, _, held = results("sequence_parallel-full-0")
    _, _, gathered_again = results("sequence_parallel-all-and-gather-again-0")
    _, _, unplanned = results("sequence_parallel-selective-0")
    _, _, only_gathered_again = results("sequence_parallel-gather-again-0")
    hidden_bytes = 2 * 16 * 32 * 4
    assert held["held"]["communication"] - gathered_again["held"]["communication"] == 2 * hidden_bytes
    assert only_gathered_again["dropped"] == 2 * 2 * hidden_bytes  # in two layers
    assert "communication" not in unplanned["held"]


@pytest.mark.parametrize("wrap", [tensor_parallel, tensor_parallel_between_modules, sequence_parallel])
def test_invariant_09_distributed_tensors_are_recomputed_like_any_other(
    results: Callable[[str], Any], wrap: Wrap
) -> None:
    _, _, facts = results(f"{wrap.__name__}-full-0")
    assert set(facts["held"]) <= {"input", "communication"}
