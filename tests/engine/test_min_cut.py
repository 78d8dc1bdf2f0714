"""`selective` holds the fewest bytes that spare every compute-intensive op: checked against trying all choices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_runs import language_loss, planned_copy, tiny_qwen3, token_batch
from torch.utils.flop_counter import FlopCounterMode

from actmem.graph import Op, RegionGraph, Storage, Value
from actmem.planning import Action, Fates, resolve
from actmem.planning.fates import path_of_storage
from actmem.planning.min_cut import cheapest_to_hold
from actmem.planning.plan import INPUT_PATH, RuleSet
from actmem.planning.policies import POLICIES, recompute_all, recompute_cheap

# A storage of an op that is kept whatever the plan says.
KEPT = "random"


@st.composite
def graphs(draw: st.DrawFn) -> RegionGraph:
    """Up to six ops over inputs and parameters; some view, some make two outputs, some must be kept."""
    storages = [Storage(draw(st.integers(1, 30)), "input") for _ in range(draw(st.integers(1, 2)))]
    storages += [Storage(draw(st.integers(1, 30)), "parameter") for _ in range(draw(st.integers(0, 2)))]
    values = [Value(index, (1,), "float32", None) for index in range(len(storages))]
    ops: list[Op] = []
    for position in range(draw(st.integers(1, 6))):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True))
        is_view = draw(st.integers(0, 4)) == 0
        outputs = []
        for _ in range(1 if is_view else draw(st.sampled_from([1, 1, 1, 2]))):
            if is_view:
                storage = values[inputs[0]].storage
            else:
                storage = len(storages)
                kept = KEPT if draw(st.integers(0, 6)) == 0 else None
                storages.append(Storage(draw(st.integers(0, 30)), "op", kept))
            outputs.append(len(values))
            values.append(Value(storage, (1,), "float32", position))
        read = (inputs[0],) if is_view else tuple(inputs)
        intensive = not is_view and draw(st.booleans())
        ops.append(Op(f"m.op{position}", f"op{position}", read, tuple(outputs), is_view, intensive, 0, 0))
    packed = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=5))
    return RegionGraph(tuple(ops), tuple(values), tuple(storages), tuple(packed))


def fates_of_policy(graph: RegionGraph, policy: Any) -> Fates:
    return resolve(graph, RuleSet(policy(graph)).action_of)


def replays_intensive(fates: Fates) -> bool:
    return any(fates.graph.ops[position].compute_intensive for position in fates.replayed)


def fewest_bytes_by_trying_all(graph: RegionGraph) -> int:
    """The least held bytes over all ways to save or recompute each op, those out that re-run an intensive one."""
    creators = sorted(set(graph.creators.values()))
    best = None
    for choice in itertools.product([Action.SAVE, Action.RECOMPUTE], repeat=len(creators)):
        actions = {graph.ops[op].path: action for op, action in zip(creators, choice, strict=True)}
        fates = resolve(graph, lambda path, actions=actions: actions.get(path, Action.SAVE))
        if not replays_intensive(fates) and (best is None or fates.held_bytes < best):
            best = fates.held_bytes
    assert best is not None
    return best


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_selective_holds_the_fewest_bytes_of_all_choices(graph: RegionGraph) -> None:
    fates = fates_of_policy(graph, recompute_cheap)
    assert not replays_intensive(fates)
    assert fates.held_bytes == fewest_bytes_by_trying_all(graph)


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_the_cut_is_what_the_fates_hold(graph: RegionGraph) -> None:
    held = cheapest_to_hold(graph)
    assert graph.num_bytes(held) == fates_of_policy(graph, recompute_cheap).held_bytes
    assert all(graph.storages[index].kind != "parameter" for index in held)


@settings(max_examples=100, deadline=None)
@given(graph=graphs(), data=st.data())
def test_whatever_the_actions_the_backward_pass_can_run(graph: RegionGraph, data: st.DataObject) -> None:
    """Each packed value, and each input of a replayed op, is held, swapped, a parameter, or made by a replayed op."""
    actions = {path: data.draw(st.sampled_from(Action)) for path in (INPUT_PATH, *(op.path for op in graph.ops))}
    fates = resolve(graph, actions.__getitem__)
    needed = [*graph.packed, *(value for position in fates.replayed for value in graph.ops[position].inputs)]
    for index in needed:
        value = graph.values[index]
        elsewhere = value.storage in fates.held or value.storage in fates.swapped
        assert elsewhere or graph.storages[value.storage].kind == "parameter" or value.producer in fates.replayed
    assert fates.dropped == graph.packed_storages - set(fates.held) - fates.swapped
    assert not fates.swapped & (set(fates.held) | fates.dropped)
    for index in fates.swapped:
        storage = graph.storages[index]
        assert storage.kept is None and not storage.edited and not storage.constant and storage.kind != "parameter"
        assert actions[path_of_storage(graph, index)] is Action.SWAP
    assert all(graph.storages[index].kept for index, reason in fates.held.items() if reason == KEPT)
    assert not {index for index in fates.dropped if graph.storages[index].kept}


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_full_holds_only_inputs_and_what_is_always_saved(graph: RegionGraph) -> None:
    assert set(fates_of_policy(graph, recompute_all).held_bytes_by_reason) <= {"input", KEPT}


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_policies_depend_on_the_graph_alone_and_graphs_survive_json(graph: RegionGraph) -> None:
    again = RegionGraph.from_dict(graph.to_dict())
    assert again == graph
    assert all(policy(again) == policy(graph) for policy in POLICIES.values())


@pytest.mark.parametrize("family", ["dense", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_selective_never_runs_an_intensive_op_again(family: str, attention: str) -> None:
    """On the real layer: matmuls, attention and grouped products run as often as without a plan."""
    counts = []
    for policy in ("none", "selective", "full"):
        planned, applied = planned_copy(tiny_qwen3(family, attention=attention), policy, verify="off")
        with applied:
            for step in range(3):
                with FlopCounterMode(display=False) as flops:
                    language_loss(token_batch(step))(planned).backward()
        counts.append(flops.get_flop_counts()["Global"])
    assert counts[0] == counts[1]
    assert sum(counts[2].values()) > sum(counts[1].values())


@pytest.mark.parametrize("family", ["dense", "grouped_mm", "batched_mm", "eager"])
def test_full_holds_only_inputs_and_always_saved_kinds_of_a_real_layer(family: str) -> None:
    planned, applied = planned_copy(tiny_qwen3(family), "full")
    with applied:
        for step in range(3):
            language_loss(token_batch(step))(planned).backward()
    for region in applied.stats.regions:
        assert "saved" not in region.held_bytes_by_reason
        assert region.dropped_bytes > 2 * region.held_bytes


@pytest.mark.parametrize("family", ["dense", "grouped_mm"])
def test_selective_holds_less_than_saving_all_intensive_outputs(family: str) -> None:
    """Torch's usual rule, to save what each matmul and attention gives, is one of the choices, and not the best."""
    held = {}
    for policy in ("none", "selective", "full"):
        planned, applied = planned_copy(tiny_qwen3(family), policy)
        with applied:
            language_loss(token_batch())(planned).backward()
        held[policy] = applied.stats.held_bytes
    assert held["full"] < held["selective"] < 0.7 * held["none"]
