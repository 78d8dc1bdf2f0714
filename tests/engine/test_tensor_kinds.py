"""Views, strides and shared storages come back exactly as they were; so do tensors of every kind and size."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Outcome,
    Stack,
    assert_same_outcome,
    assert_stack_unchanged,
    features,
    gradients_of,
    planned_copy,
    stack_steps,
    tiny_qwen3,
    token_batch,
    two_blocks,
)
from torch import Tensor, nn
from torch.nn import functional

# Small regions often leave a policy nothing to drop, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")

POLICIES = ("none", "full", "selective")
Forward = Callable[[Any, Tensor], Any]


def transposed(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).t() * 2
    return (inner.sin() * inner).t().exp().clamp(max=3)


def heads(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).view(4, 2, 4).transpose(0, 1)
    return (inner.softmax(-1) @ inner.transpose(1, 2)).permute(1, 0, 2).reshape(4, 8).sin()


def expanded(block: Any, hidden: Tensor) -> Tensor:
    mean = (block.linear(hidden).mean(1, keepdim=True) * 2).expand(4, 8)
    return (mean * hidden).sin() * mean.broadcast_to(3, 4, 8)[1].cos()


def chunks(block: Any, hidden: Tensor) -> Tensor:
    left, right = (block.linear(hidden) * 2).chunk(2, -1)
    rotated = torch.cat((-right, left), -1)
    return rotated.sin() * torch.cat((left.cos(), right * left), -1)


def splits(block: Any, hidden: Tensor) -> Tensor:
    query, key, value = (block.linear(hidden).sin() * 2).split([2, 2, 4], dim=1)
    _unused, used = torch.split(value, 2, 1)
    return torch.cat((query * key, key.exp(), used * query, hidden[:, :2]), 1)


def unbound(block: Any, hidden: Tensor) -> Tensor:
    rows = block.linear(hidden).tanh().unbind(0)
    return torch.stack([rows[3] * rows[1], rows[0].exp(), rows[1].sin(), rows[2] * rows[0]])


def slices(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 3
    return inner[::2].repeat(2, 1).sin() * inner[1:3, None].expand(2, 2, 8).reshape(4, 8).tanh() * inner.flip(0).sin()


def diagonals(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).sin() * 2
    return hidden * inner.diagonal().exp().sum() + inner.unfold(1, 4, 2).square().sum((1, 2))[:, None]


def strided(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).sin() * 2
    return torch.cat((inner[1:].as_strided((3, 8), (8, 1), 8).exp(), hidden[:1])).sin()


def channels_last(block: Any, hidden: Tensor) -> Tensor:
    image = block.linear(hidden).view(1, 2, 4, 4).to(memory_format=torch.channels_last)
    image = functional.conv2d(image, block.kernel.contiguous(memory_format=torch.channels_last), padding=1)
    return functional.max_pool2d(image.relu(), 1).sigmoid().contiguous().view(4, 8)


def empty(block: Any, hidden: Tensor) -> Tensor:
    nothing = block.linear(hidden[:0]) * 2
    return torch.cat((hidden.sin() * nothing.sum(), (nothing * nothing).exp())) + hidden


def scalars(block: Any, hidden: Tensor) -> Tensor:
    scale = block.linear(hidden).mean() * 2
    temperature = torch.tensor(0.5) * scale.exp()
    return hidden * scale.sin() * temperature + scale.item()


def complex_rotation(block: Any, hidden: Tensor) -> Tensor:
    pairs = torch.view_as_complex(block.linear(hidden).view(4, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(pairs * pairs.exp()).flatten(1).sin()


def conjugates(block: Any, hidden: Tensor) -> Tensor:
    pairs = torch.view_as_complex(block.linear(hidden).view(4, 4, 2)) * 2
    lazily = pairs.conj() * 1j
    return torch.cat(((pairs * lazily.conj()).real, (pairs.conj().imag * 2).sin()), 1)


def spectra(block: Any, hidden: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(block.linear(hidden)).tanh(), n=8)


def double_precision(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).double().square()
    return (inner.log1p() * inner.half().float().sin()).float()


def sparse(block: Any, hidden: Tensor) -> Tensor:
    return torch.sparse.mm((block.linear(hidden) * 2).to_sparse(), block.linear.weight.t()).sin()


def product_with_sparse(block: Any, hidden: Tensor) -> Tensor:
    rows = torch.eye(4).flip(0).to_sparse()
    return (rows @ block.linear(hidden).relu()).sin()


def jagged(block: Any, hidden: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor_from_jagged(block.linear(hidden) * 2, torch.tensor([0, 1, 4]))
    return (ragged * ragged.sin()).values().tanh()


def inference_constant(block: Any, hidden: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = torch.ones(8) * 2
    return torch.tanh(block.linear(hidden) + constant)


def data_alias(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    return (block.linear(inner.data) * inner.square() + inner.detach() * inner).tanh()


def several_reads_of_one_view(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden)[:, ::2] * 2
    return torch.cat((inner * inner.sin(), inner.cos() * inner.exp()), 1).tanh()


def returned_and_saved(block: Any, hidden: Tensor) -> Tensor:
    return torch.exp(torch.tanh(block.linear(hidden)))


def its_input(block: Any, hidden: Tensor) -> Tensor:
    return hidden


def view_of_its_input(block: Any, hidden: Tensor) -> Tensor:
    return hidden.view(2, 16).view(4, 8)


def recurrent_in_one_kernel(block: Any, hidden: Tensor) -> Tensor:
    return torch.tanh(block.cell(block.linear(hidden).view(4, 1, 8))[0].view(4, 8))


def recurrent(block: Any, hidden: Tensor) -> Tensor:
    return block.cell(block.linear(hidden)[None])[0][0]


def convolution(block: Any, hidden: Tensor) -> Tensor:
    channels = functional.conv_transpose1d(block.linear(hidden)[None], block.kernel)[0]
    return channels.tanh().repeat(2, 1)


def attention_of_three_dimensions(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden)[None]
    return functional.scaled_dot_product_attention(inner, inner * 2, inner.sin(), is_causal=True)[0]


def matrix_products(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).tanh()
    product = torch.baddbmm(hidden[None], inner[None], block.linear.weight[None], beta=0.5, alpha=2.0)[0]
    return torch.einsum("bi,ij->bj", product.sin(), block.linear.weight).cos()


def sorting(block: Any, hidden: Tensor) -> Tensor:
    values, indices = (block.linear(hidden) * 2).topk(3, 1)
    return hidden.scatter_add(1, indices, values.exp()).sort(1)[0].tanh()


def decomposition(block: Any, hidden: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(block.linear(hidden), full_matrices=False)
    return ((left * values.log1p()) @ right).sin()


PARTS: dict[Forward, dict[str, Any]] = {
    channels_last: {"kernel": features(2, 2, 3, 3)},
    convolution: {"kernel": features(4, 2, 1)},
    recurrent: {"cell": nn.GRU(8, 8)},
    recurrent_in_one_kernel: {"cell": nn.LSTM(8, 8)},
}
CASES = [
    transposed, heads, expanded, chunks, splits, unbound, slices, diagonals, strided, channels_last, empty, scalars,
    complex_rotation, conjugates, spectra, double_precision, sparse, product_with_sparse, jagged, inference_constant,
    data_alias, several_reads_of_one_view, returned_and_saved, recurrent, recurrent_in_one_kernel, convolution,
    attention_of_three_dimensions, matrix_products, sorting, decomposition,
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", CASES, ids=lambda each: each.__name__)
def test_invariant_07_values_come_back_as_they_were(forward: Forward, policy: str) -> None:
    applied = assert_stack_unchanged(two_blocks(forward, **PARTS.get(forward, {})), policy)
    if policy == "none":
        assert applied.stats.num_replayed_ops == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", [its_input, view_of_its_input], ids=lambda each: each.__name__)
def test_invariant_07_a_region_without_work_of_its_own(forward: Forward, policy: str) -> None:
    blocks = [FunctionBlock(each, seed=1) for each in (transposed, forward, transposed)]
    assert_stack_unchanged(Stack(*blocks), policy)


class Layout(torch.autograd.Function):
    """Doubles its input; what the backward pass gets to see of it goes to `seen`."""

    seen: list[tuple[object, ...]]

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        Layout.seen.append((inputs.shape, inputs.stride(), inputs.storage_offset(), inputs.dtype, inputs.requires_grad))
        return gradient * inputs.cos()


def layouts(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    views = [inner.t(), inner[1:, ::2], inner[2], inner.view(2, 2, 8).transpose(0, 1), inner[:, 3:4].expand(4, 6)]
    return hidden * torch.stack([Layout.apply(view).sum() for view in views]).sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_07_views_have_their_size_stride_and_offset(policy: str) -> None:
    model = Stack(FunctionBlock(layouts))
    planned, applied = planned_copy(model, policy, regions=["blocks.0"])
    seen = []
    with applied:
        for each in (planned, model):
            Layout.seen = []
            stack_steps(each)
            seen.append(Layout.seen)
    assert len(seen[1]) == 15
    assert seen[0] == seen[1]


def test_invariant_07_a_storage_is_held_once_however_many_views_are_saved() -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = block.linear(hidden)
        return inner.sin() * inner.t().exp().t() + inner[1:].square().sum() + inner.view(2, 16).cos().sum()

    planned, applied = planned_copy(Stack(FunctionBlock(forward)), "none", regions=["blocks.0"])
    with applied:
        planned(features(4, 8)).sum().backward()
    size = 4 * 8 * 4
    held = applied.stats.regions[0].held_bytes_by_reason
    assert held == {"input": size, "saved": 3 * size}, "inner once, and the two factors"


@dataclasses.dataclass
class Record:
    value: Tensor
    extra: dict[str, Any]


def as_tuple(block: Any, hidden: Tensor) -> Any:
    inner = block.linear(hidden).sin()
    return inner * hidden, None, inner.exp(), 3, inner


def as_dict(block: Any, hidden: Tensor) -> Any:
    inner = block.linear(hidden).sin()
    return {"value": inner * hidden, "nested": [inner.exp(), (inner,)]}


def as_dataclass(block: Any, hidden: Tensor) -> Any:
    inner = block.linear(hidden).sin()
    return Record(inner * hidden, {"inner": inner.exp(), "input": hidden})


def tensors_in(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, Record):
        return tensors_in([out.value, out.extra])
    inside = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return [tensor for each in inside for tensor in tensors_in(each)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", [as_tuple, as_dict, as_dataclass], ids=lambda each: each.__name__)
def test_invariant_01_outputs_of_any_structure(forward: Forward, policy: str) -> None:
    def run(model: nn.Module, number: int) -> Outcome:
        out = model(features(4, 8, seed=number).requires_grad_())
        assert type(out) is type(forward(model.blocks[0], features(4, 8)))
        sum(each.square().sum() for each in tensors_in(out)).backward()
        return gradients_of(model)

    assert_same_outcome(Stack(FunctionBlock(forward)), policy, run, regions=["blocks.0"])


class Mixer(nn.Module):
    """Takes tensors by keyword, in lists and dicts, besides things that are no tensors; it has no parameters."""

    def forward(
        self, *, hidden: Tensor, others: list[Tensor], settings: dict[str, Any], mask: Tensor | None = None
    ) -> Tensor:
        out = torch.sin(hidden * others[0]) * others[1].exp()
        if mask is not None:
            out = out.masked_fill(mask, 0.0)
        return out * settings["scale"] + settings["shift"].tanh()


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_01_inputs_by_keyword_and_no_parameters(policy: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mixer = nn.Linear(8, 8), Mixer()

    def run(model: nn.Module, number: int) -> Outcome:
        hidden = model.linear(features(4, 8, seed=number))
        out = model.mixer(
            hidden=hidden,
            others=[hidden * 2, features(4, 8)],
            settings={"scale": 0.5 + number, "shift": hidden.mean()},
            mask=features(4, 8) > 1 if number % 2 else None,
        )
        out.square().mean().backward()
        return gradients_of(model)

    assert_same_outcome(Outer(), policy, run, regions=["mixer"], num_rounds=6)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_invariant_03_a_dropped_tensor_lives_on_for_whoever_else_holds_it(policy: str) -> None:
    planned, applied = planned_copy(tiny_qwen3(), policy)
    kept: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            kept[name], copies[name] = tensor, tensor.detach().clone()

        return hook

    for name, module in planned.model.layers.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(keep(name))
    with applied:
        for step in range(3):
            loss = planned(**token_batch(step)).loss
            for _ in range(2):
                assert all(torch.equal(kept[name], copies[name]) for name in kept)
                loss.backward(retain_graph=True)
            assert all(each.untyped_storage().nbytes() for each in kept.values())
    assert applied.stats.dropped_bytes > 0


class WeightAddress(torch.autograd.Function):
    """A product that saves a transposed weight, and notes where the backward pass finds it."""

    addresses: list[int]

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, transposed)
        return inputs @ transposed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, transposed = ctx.saved_tensors
        WeightAddress.addresses.append(transposed.data_ptr())
        return gradient @ transposed.t(), inputs.t() @ gradient


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_08_parameters_buffers_and_their_views_are_never_copied(policy: str) -> None:
    def forward(block: Any, hidden: Tensor) -> Tensor:
        inner = WeightAddress.apply(hidden.sin(), block.linear.weight.t())
        return WeightAddress.apply(inner.exp().clamp(max=3), block.table[1:, :8]) * block.table[0, :8]

    model = Stack(FunctionBlock(forward, table=features(9, 12) / 4))
    planned, applied = planned_copy(model, policy, regions=["blocks.0"])
    block = planned.blocks[0]
    with applied:
        for _ in range(3):
            WeightAddress.addresses = []
            planned(features(4, 8).requires_grad_()).sum().backward()
            assert WeightAddress.addresses == [block.table[1:].data_ptr(), block.linear.weight.data_ptr()]
    assert applied.stats.held_bytes <= 6 * 4 * 8 * 4


def test_invariant_08_held_bytes_leave_parameters_out(qwen3: nn.Module) -> None:
    planned, applied = planned_copy(qwen3, "full")
    with applied:
        planned(**token_batch()).loss.backward()
        region = applied.stats.regions[0]
        hidden_bytes, rotary_bytes = 2 * 16 * 32 * 4, 2 * 16 * 8 * 4
        assert region.held_bytes_by_reason["input"] == hidden_bytes + rotary_bytes
        assert set(region.held_bytes_by_reason) <= {"input", "integer or bool"}


def test_deep_copies_keep_the_parts_apart() -> None:
    """Guards the tests themselves: two blocks of one function do not share what they were given."""
    first, second = two_blocks(recurrent, cell=nn.GRU(8, 8)).blocks
    assert first.cell is not second.cell
    assert copy.deepcopy(first).function is first.function
