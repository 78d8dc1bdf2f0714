"""In-place edits: refused exactly where autograd refuses them, and otherwise of no consequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Outcome,
    Stack,
    assert_same_buffers,
    assert_same_outcome,
    assert_same_steps,
    assert_same_tensors,
    assert_stack_unchanged,
    block_names,
    features,
    gradients_of,
    planned_copy,
    stack_steps,
    two_blocks,
)
from torch import Tensor, nn
from torch.nn import functional

from actmem.errors import InPlaceEditError
from actmem.planning import Action, Plan, Rule

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")

POLICIES = ("none", "full", "selective")
Forward = Callable[[Any, Tensor], Tensor]
AUTOGRADS_WORDS = "modified by an inplace operation"


def legal_add(block: Any, hidden: Tensor) -> Tensor:
    out = block.linear(hidden)
    out.add_(hidden)
    return torch.tanh(out)


def legal_read_then_edited(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    shifted = inner + 1
    inner.mul_(0.5)
    return shifted.sin() * inner.cos()


def legal_read_twice_edited_twice(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden)
    first = (inner + 1).sin()
    inner.add_(1)
    second = (inner - 2).cos()
    inner.mul_(0.1)
    return first * second + inner.exp()


def legal_edit_of_the_regions_input(block: Any, hidden: Tensor) -> Tensor:
    hidden = hidden + 0
    before = (hidden + 1).sin()
    hidden.mul_(0.5)
    return before * block.linear(hidden).cos()


def legal_edit_of_a_view(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) + 1
    shifted = (inner - 1).sin()
    inner[1:3, ::2].mul_(3)
    return shifted * inner.sin()


def legal_edit_of_the_base_after_a_view_was_read(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) + 1
    columns = inner.t()[2:6]
    shifted = (columns * 2).sin()
    inner.zero_()
    return inner + hidden * shifted.sum()


def legal_set_item(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    inner[:, 0] = hidden[:, 1]
    inner[hidden[:, 2] > 0] = 0.5
    inner[1] = 1
    inner[:, 4:] += hidden[:, 4:].sin()
    return torch.sin(inner)


def legal_index_add(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    inner.index_add_(0, torch.tensor([0, 2]), hidden[:2].sin())
    return torch.sigmoid(inner)


def legal_index_put_and_scatter(block: Any, hidden: Tensor) -> Tensor:
    inner = torch.zeros_like(hidden).index_put_((torch.tensor([1, 1]),), block.linear(hidden)[:2], accumulate=True)
    inner.scatter_add_(1, torch.tensor([[0], [1], [2], [3]]), hidden[:, :1].exp())
    return torch.tanh(inner)


def legal_masked_fill(block: Any, hidden: Tensor) -> Tensor:
    scores = block.linear(hidden) * 0.5
    scores.masked_fill_(hidden > 1, -1e4)
    return torch.softmax(scores, -1) * hidden


def legal_relu(block: Any, hidden: Tensor) -> Tensor:
    return functional.relu(block.linear(hidden), inplace=True) * torch.relu_(hidden * 2)


def legal_dropout(block: Any, hidden: Tensor) -> Tensor:
    return torch.sin(functional.dropout(block.linear(hidden), 0.4, training=True, inplace=True))


def legal_random_fill(block: Any, hidden: Tensor) -> Tensor:
    noise = torch.empty_like(hidden).uniform_(0.5, 1.5)
    noise.bernoulli_(0.5)
    return torch.exp(block.linear(hidden) * noise).clamp(max=3)


def legal_out_variants(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden)
    with torch.no_grad():
        scale = torch.empty(8)
        torch.mean(inner, 0, out=scale)
        torch.exp(scale, out=scale)
    return torch.tanh(inner * scale)


def legal_copy(block: Any, hidden: Tensor) -> Tensor:
    target = torch.zeros(4, 8)
    target[:2].copy_(block.linear(hidden)[:2])
    target[2:].copy_(hidden[2:].double() * 2)
    return target.sin() * target.cos()


def legal_foreach(block: Any, hidden: Tensor) -> Tensor:
    pair = [block.linear(hidden), hidden * 2]
    shifted = pair[0] + pair[1]
    torch._foreach_mul_(pair, 0.5)
    return shifted.sin() * pair[0] + pair[1]


def legal_change_of_shape(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    shifted = inner + 1
    inner.t_()
    inner.unsqueeze_(0)
    return shifted.sin() * (inner * 3)[0].t().cos()


def legal_in_place_activation_chain(block: Any, hidden: Tensor) -> Tensor:
    return functional.leaky_relu_(block.linear(hidden).add_(0.1)).sin() + hidden


def legal_edit_under_no_grad(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden)
    shifted = inner + 1
    with torch.no_grad():
        inner.detach().clamp_(-1, 1)
    return shifted.sin() + inner


def legal_edit_of_what_was_made_without_gradients(block: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        scale = hidden.abs() + 1
        factor = scale * 2
        scale.mul_(0)
    return torch.sin(block.linear(hidden) * factor)


def illegal_saved_output(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).tanh()
    return inner.add_(1)


def illegal_saved_input(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    square = inner * inner
    inner.add_(1)
    return square


def illegal_saved_and_made_equal_again(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    square = inner.sin()
    inner.mul_(1)
    return square + hidden


def illegal_view_of_what_was_saved(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).sigmoid()
    inner[0].mul_(2)
    return inner


def illegal_base_of_a_saved_view(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    square = inner[1:].square()
    inner[:1].zero_()
    return square.sum() + inner


def illegal_alias_of_what_was_saved(block: Any, hidden: Tensor) -> Tensor:
    inner = (block.linear(hidden) * 2).exp()
    inner.detach().clamp_(max=2)
    return inner * 2


def illegal_regions_input(block: Any, hidden: Tensor) -> Tensor:
    hidden = hidden * 1
    out = block.linear(hidden)
    hidden.add_(1)
    return out + hidden


def illegal_random_mask(block: Any, hidden: Tensor) -> Tensor:
    mask = torch.rand(4, 8)
    out = block.linear(hidden) * mask
    mask.add_(1)
    return out


def illegal_integer_index(block: Any, hidden: Tensor) -> Tensor:
    rows = torch.arange(4)
    out = block.linear(hidden)[rows]
    rows.add_(0)
    return out


def illegal_weight(block: Any, hidden: Tensor) -> Tensor:
    out = block.linear(hidden * 2)
    with torch.no_grad():
        block.linear.weight.mul_(1)
    return out


def illegal_one_of_a_list(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    out = inner.sin()
    torch._foreach_add_([torch.ones(1), inner], 1.0)
    return out + inner


def illegal_out_variant(block: Any, hidden: Tensor) -> Tensor:
    scale = torch.ones(4, 8)
    out = block.linear(hidden) * scale
    torch.exp(scale, out=scale)
    return out


CASES = [function for name, function in list(globals().items()) if name.startswith(("legal_", "illegal_"))]


def verdict(model: nn.Module, number: int) -> Outcome | str:
    """Gradients of one step, or the word that autograd would not have it."""
    model.zero_grad()
    torch.manual_seed(number)
    inputs = features(4, 8, seed=number).requires_grad_()
    out = model(inputs)
    try:
        out.square().mean().backward()
    except RuntimeError as error:
        assert AUTOGRADS_WORDS in str(error)
        return "refused"
    assert inputs.grad is not None
    return gradients_of(model) | {"input": inputs.grad}


def assert_same_verdicts(model: nn.Module, policy: str, expected: str, **options: Any) -> None:
    planned, applied = planned_copy(model, policy, **options)
    with applied:
        for number in range(3):
            mine, theirs = verdict(planned, number), verdict(model, number)
            assert (theirs == "refused") == (expected == "refused"), "the case is not what its name says"
            if isinstance(mine, str) or isinstance(theirs, str):
                assert mine == theirs, f"round {number}"
            else:
                assert_same_tensors(mine, theirs, f"round {number}: ")
    assert_same_buffers(planned, model)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", CASES, ids=lambda each: each.__name__)
def test_invariant_06_edits_inside_a_region(forward: Forward, policy: str) -> None:
    expected = "refused" if forward.__name__.startswith("illegal") else "gradients"
    assert_same_verdicts(two_blocks(forward), policy, expected, regions=["blocks.0", "blocks.1"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", CASES, ids=lambda each: each.__name__)
def test_invariant_06_edits_inside_a_region_whose_ops_vary(forward: Forward, policy: str) -> None:
    """No two calls run the same ops, so the rules are asked at every op."""

    def varying(block: Any, hidden: Tensor) -> Tensor:
        block.num_calls += 1
        for _ in range(block.num_calls):
            hidden = hidden + 0.01
        return forward(block, hidden)

    expected = "refused" if forward.__name__.startswith("illegal") else "gradients"
    model = Stack(FunctionBlock(varying, num_calls=0))
    planned, applied = planned_copy(model, policy, regions=["blocks.0"])
    with applied:
        for number in range(6):
            mine, theirs = verdict(planned, number), verdict(model, number)
            assert (theirs == "refused") == (expected == "refused"), "the case is not what its name says"
            if isinstance(mine, str) or isinstance(theirs, str):
                assert mine == theirs, f"round {number}"
            else:
                assert_same_tensors(mine, theirs, f"round {number}: ")
    if policy == "full" and expected == "gradients":
        assert applied.stats.regions[0].num_streamed_calls > 0


class EditAfterwards(nn.Module):
    """A region, and an edit of something after it has run. The region leaves its inner tensor where it can be found."""

    def __init__(self, forward: Forward, edit: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FunctionBlock(forward)])
        self.edit = edit

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * 1
        out = self.blocks[0](hidden)
        self.edit(self.blocks[0], hidden, out)
        return out.cos() + hidden


def exponential(block: Any, hidden: Tensor) -> Tensor:
    block.found = block.linear(hidden) * 2
    return torch.exp(block.found.sin())


def residual(block: Any, hidden: Tensor) -> Tensor:
    block.found = torch.sin(block.linear(hidden)) * 0.5
    return hidden + block.found


def shifted_square(block: Any, hidden: Tensor) -> Tensor:
    """Saves neither its input nor `found`, but what is made of both."""
    block.found = hidden * 2
    return (block.found + 1).square() + block.linear.bias


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("forward", "edit", "expected"),
    [
        pytest.param(exponential, lambda block, hidden, out: out.add_(1), "refused", id="saved output"),
        pytest.param(exponential, lambda block, hidden, out: out[1].add_(1), "refused", id="view of a saved output"),
        pytest.param(
            exponential, lambda block, hidden, out: out.detach().add_(1), "refused", id="alias of a saved output"
        ),
        pytest.param(exponential, lambda block, hidden, out: block.found.mul_(2), "refused", id="inner saved tensor"),
        pytest.param(exponential, lambda block, hidden, out: hidden.add_(1), "refused", id="saved input"),
        pytest.param(residual, lambda block, hidden, out: out.add_(1), "gradients", id="output that nobody saved"),
        pytest.param(residual, lambda block, hidden, out: block.found.add_(1), "gradients", id="inner unsaved tensor"),
        pytest.param(shifted_square, lambda block, hidden, out: block.found.zero_(), "gradients", id="inner link"),
        pytest.param(
            residual, lambda block, hidden, out: block.linear.weight.data.add_(0), "gradients", id="data of a weight"
        ),
    ],
)
def test_invariant_06_edits_after_a_region(forward: Forward, edit: Any, expected: str, policy: str) -> None:
    assert_same_verdicts(EditAfterwards(forward, edit), policy, expected, regions=["blocks.0"])


def test_invariant_06_an_edited_input_is_refused_where_only_the_replay_reads_it() -> None:
    """Autograd did not save this input, so no plan can have it both dropped and edited: the error says what to save."""

    def model() -> nn.Module:
        return EditAfterwards(shifted_square, lambda block, hidden, out: hidden.mul_(2))

    assert_same_verdicts(model(), "none", "gradients", regions=["blocks.0"])
    planned, applied = planned_copy(model(), "full", regions=["blocks.0"])
    with applied:
        for _ in range(3):
            with pytest.raises(InPlaceEditError, match=AUTOGRADS_WORDS) as caught:
                planned(features(4, 8).requires_grad_()).sum().backward()
            assert "mul" in str(caught.value) and "blocks.0" in str(caught.value)
            assert "save" in str(caught.value)
    mended = Plan("mended", (Rule(".*", Action.RECOMPUTE), Rule("add", Action.SAVE)))
    assert_same_verdicts(model(), mended, "gradients", regions=["blocks.0"])


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_06_the_error_is_autograds_own_and_says_where(policy: str) -> None:
    planned, applied = planned_copy(two_blocks(illegal_saved_output), policy, regions=["blocks.0", "blocks.1"])
    with applied, pytest.raises(RuntimeError, match="is at version 1; expected version 0") as caught:
        planned(features(4, 8)).sum().backward()
    if policy == "full":
        assert isinstance(caught.value, InPlaceEditError)
        assert "tanh" in str(caught.value) and "blocks.1" in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_invariant_02_batch_norm_counts_each_batch_once(settings: dict[str, Any], training: bool, policy: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        return torch.relu(block.norm(block.linear(hidden) * 2)) + hidden

    assert_stack_unchanged(two_blocks(forward, norm=nn.BatchNorm1d(8, **settings)).train(training), policy)


def test_invariant_12_batch_norm_costs_nothing_without_recompute() -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        return torch.relu(block.norm(block.linear(hidden)))

    applied = assert_stack_unchanged(two_blocks(forward, norm=nn.BatchNorm1d(8)), "none")
    assert applied.stats.num_replayed_ops == 0
    assert applied.stats.dropped_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_06_buffers_that_every_call_edits(policy: str) -> None:
    """Two forwards before a backward: the first call's numbers must be those from before the second."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            block.mean.lerp_(hidden.mean(0), 0.1)
            block.count.add_(1)
        return torch.tanh(block.linear(hidden) - block.mean) * (block.mean + 1).sin() + block.count

    def two_forwards(model: nn.Module, number: int) -> Outcome:
        first, second = model(features(4, 8, seed=number)), model(features(4, 8, seed=number + 50))
        (first * second).sum().backward()
        return gradients_of(model)

    def saves_none_of_them(model: nn.Module, number: int) -> Outcome:
        outs = [model(features(4, 8, seed=number)), model(features(4, 8, seed=number + 50))]
        torch.stack(outs).sum().backward()
        return gradients_of(model)

    model = two_blocks(forward, mean=torch.zeros(8), count=torch.zeros((), dtype=torch.long))
    for scenario in (two_forwards, saves_none_of_them):
        assert_same_outcome(copy.deepcopy(model), policy, scenario, regions=block_names(model))


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_06_spectral_norm_called_twice(policy: str) -> None:
    """Its power iteration edits buffers in each call and clones them so that an earlier graph stays whole."""
    torch.manual_seed(0)
    shared = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    model = Stack(*[FunctionBlock(lambda block, hidden: block.inner(hidden).tanh(), inner=shared) for _ in range(2)])
    planned, applied = planned_copy(model, policy, regions=block_names(model))
    with applied:
        assert_same_steps(stack_steps(planned), stack_steps(model))
    assert_same_buffers(planned, model)


class TripleInPlace(torch.autograd.Function):
    """Writes its input where no dispatch mode sees it, and says so as autograd asks for."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        inputs.detach().numpy()[...] *= 3
        ctx.mark_dirty(inputs)
        return inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_06_a_function_that_edits_its_input(policy: str, verify: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden) * 0.5
        before = (inner + 1).exp().clamp(max=3)
        return before * TripleInPlace.apply(inner).sin()

    assert_same_verdicts(two_blocks(forward), policy, "gradients", regions=["blocks.0", "blocks.1"], verify=verify)


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_06_a_function_that_edits_what_was_saved(policy: str, verify: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden) * 0.5
        return inner.sin() * TripleInPlace.apply(inner)

    assert_same_verdicts(two_blocks(forward), policy, "refused", regions=["blocks.0", "blocks.1"], verify=verify)


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_01_data_replaced_inside_a_region(policy: str, verify: str) -> None:
    """No op and no version tells of it, but the storage is another one."""

    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden) * 0.5
        before = inner * 1.5
        inner.data = inner.data * 3
        return (inner + 1).exp().clamp(max=3) * before.sin()

    assert_same_verdicts(two_blocks(forward), policy, "gradients", regions=["blocks.0", "blocks.1"], verify=verify)
