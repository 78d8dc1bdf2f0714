"""Numbers that differ from the forward pass's stop the training, and the error says where and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_runs import FunctionBlock, Stack, features, language_loss, planned_copy, tiny_qwen3, token_batch
from torch import Tensor

from actmem.errors import ActmemError, ReplayMismatchError
from actmem.planning import Action, Plan, Rule
from actmem.runtime import apply
from actmem.runtime.digest import digest_of

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")


def written_by_numpy(block: Any, hidden: Tensor) -> Tensor:
    """Changes a tensor behind torch's back: no op, no version."""
    inner = block.linear(hidden) * 2
    inner.detach().numpy()[1, 2:] += 1
    return torch.sin(inner) * hidden


def impure(block: Any, hidden: Tensor) -> Tensor:
    return draw(block.linear(hidden) * 0.5).exp()


@torch.library.custom_op("actmem_tests::draw", mutates_args=())
def draw(inputs: Tensor) -> Tensor:
    """Random, without saying so."""
    return inputs + torch.rand_like(inputs)


draw.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize(("forward", "op"), [(written_by_numpy, "mul"), (impure, "exp")])
def test_invariant_15_a_mismatch_names_the_op_and_the_remedy(forward: Any, op: str, verify: str) -> None:
    planned, applied = planned_copy(Stack(FunctionBlock(forward)), "full", regions=["blocks.0"], verify=verify)
    with applied, pytest.raises(ReplayMismatchError) as caught:
        planned(features(4, 8).requires_grad_()).sum().backward()
    message = str(caught.value)
    for part in (op, "blocks.0", "(4, 8)", "torch.float32", "save", "deterministic"):
        assert part in message
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ActmemError)


@pytest.mark.parametrize("forward", [written_by_numpy, impure])
def test_invariant_15_the_remedy_that_the_error_names_works(forward: Any) -> None:
    """Following the advice, once for each complaint, ends with a plan that trains."""
    rules = [Rule(".*", Action.RECOMPUTE)]
    for _ in range(4):
        plan = Plan("advised", tuple(rules))
        planned, applied = planned_copy(Stack(FunctionBlock(forward)), plan, regions=["blocks.0"], verify="always")
        try:
            with applied:
                for _ in range(3):
                    planned(features(4, 8).requires_grad_()).sum().backward()
            return
        except ReplayMismatchError as error:
            advised = re.search(r"\{ops: '(.+?)', action: save\}", str(error))
            assert advised is not None
            rules.append(Rule(advised[1], Action.SAVE))
    pytest.fail(f"still complaining after {rules}")


def test_invariant_15_first_verifies_the_first_call_of_each_shape() -> None:
    planned, applied = planned_copy(tiny_qwen3(), "full", verify="first")
    counts = []
    with applied:
        for length in (16, 16, 12, 16, 12):
            before = sum(region.num_verified for region in applied.stats.regions)
            language_loss(token_batch(length=length))(planned).backward()
            counts.append(sum(region.num_verified for region in applied.stats.regions) - before)
        assert all(region.num_verified > 0 for region in applied.stats.regions)
    assert counts[0] == counts[2] > 0
    assert counts[1] == counts[3] == counts[4] == 0


@pytest.mark.parametrize(("verify", "verified"), [("always", [True, True, True]), ("off", [False, False, False])])
def test_invariant_15_always_and_off(verify: str, verified: list[bool]) -> None:
    planned, applied = planned_copy(tiny_qwen3("eager"), "full", verify=verify)
    found = []
    with applied:
        for step in range(3):
            before = sum(region.num_verified for region in applied.stats.regions)
            language_loss(token_batch(step))(planned).backward()
            found.append(sum(region.num_verified for region in applied.stats.regions) > before)
    assert found == verified


@pytest.mark.parametrize("verify", ["frist", "", None, True])
def test_invariant_13_a_misspelt_verify_is_refused(verify: Any) -> None:
    with pytest.raises((ActmemError, ValueError), match="first"):
        apply(tiny_qwen3(), "full", memory={"verify": verify})


def test_invariant_15_a_structure_learned_anew_is_verified_too() -> None:
    """Same shapes, other ops: what is learned then has never been compared with anything."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        block.num_calls += 1
        return hidden.sin().exp() if block.num_calls <= 2 else written_by_numpy(block, hidden)

    model = Stack(FunctionBlock(forward, num_calls=0))
    planned, applied = planned_copy(model, "full", regions=["blocks.0"], verify="first")
    with applied, pytest.raises(ReplayMismatchError):
        for _ in range(6):
            planned(features(4, 8).requires_grad_()).sum().backward()


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000), data=st.data())
def test_invariant_15_a_digest_sees_one_changed_or_swapped_element(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = features(*shape, seed=seed).to(dtype)
    assert digest_of(tensor).matches(digest_of(tensor.clone()))
    flat = tensor.clone().view(-1)
    if flat.numel() < 2:
        return
    one = data.draw(st.integers(0, flat.numel() - 1))
    other = data.draw(st.integers(0, flat.numel() - 1).filter(lambda index: index != one))
    changed = flat.clone()
    changed[one] += 1
    assert not digest_of(tensor).matches(digest_of(changed.view(shape)))
    if flat[one] != flat[other]:
        swapped = flat.clone()
        swapped[one], swapped[other] = flat[other], flat[one]
        assert not digest_of(tensor).matches(digest_of(swapped.view(shape)))


@pytest.mark.parametrize(
    "same",
    [
        lambda each: each.t().contiguous().t(),
        lambda each: torch.cat((each[:1], each))[1:],
        lambda each: torch.cat((each, each), 1)[:, : each.shape[1]],
        lambda each: each.conj().resolve_conj().conj(),
        lambda each: each.neg()._neg_view() if not each.is_complex() else each,
    ],
    ids=["transposed memory", "offset", "stride", "lazily conjugated", "lazily negated"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_invariant_15_a_digest_is_of_the_numbers_not_of_their_layout(same: Any, dtype: torch.dtype) -> None:
    tensor = features(65, 130).to(dtype)
    assert torch.equal(same(tensor), tensor)
    assert digest_of(tensor).matches(digest_of(same(tensor)))


def test_invariant_15_a_digest_tells_zero_from_negative_zero_and_takes_nan() -> None:
    tensor = torch.tensor([0.0, float("nan"), float("inf"), 1.0])
    assert digest_of(tensor).matches(digest_of(tensor.clone()))
    assert not digest_of(tensor).matches(digest_of(tensor * torch.tensor([-1.0, 1, 1, 1])))
