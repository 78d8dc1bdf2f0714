"""Experts of a mixture spread over ranks. Each rank runs its own experts by Hugging Face's own forward.

An expert's *pair* is a token and one of the experts that its router chose. Hugging Face's forward is given the pairs of
this rank's experts as if each were a token with one expert, whatever implementation of the experts is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from actmem._compat import exchange, is_fake
from actmem.errors import LayoutError
from actmem.parallel.parameters import shard_parameters, summing_gradient, surround


class SpreadExperts(ParallelStyle):
    """Experts spread over ranks that all have the same tokens.

    Each rank returns the weighted sum over its own experts, a share of the whole that is still to be summed over the
    ranks. Gradients of tokens and routing weights are summed here.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        num_own = _take_own_experts(module, device_mesh)
        first = num_own * device_mesh.get_local_rank()

        def before(hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[tuple[Any, ...], _Own]:
            hidden, weights = summing_gradient(hidden, device_mesh), summing_gradient(weights, device_mesh)
            experts = chosen.flatten() - first
            pairs = _positions((experts >= 0) & (experts < num_own), likely=len(experts) // device_mesh.size())
            own = _Own(pairs, chosen.shape)
            return _as_tokens(hidden[pairs // chosen.shape[1]], experts[pairs], weights.flatten()[pairs]), own

        surround(module, before, _sum_of_own)
        return module


@dataclass(frozen=True)
class _Own:
    """The `pairs` of this rank's experts, among those of `shape` (tokens, experts a token)."""

    pairs: Tensor
    shape: torch.Size


def _sum_of_own(out: Tensor, own: _Own) -> Tensor:
    whole = out.new_zeros(own.shape.numel(), out.shape[1])
    whole = whole.index_copy(0, own.pairs, out[: len(own.pairs)])
    return whole.view(*own.shape, -1).sum(1)


class ExchangedExperts(ParallelStyle):
    """Experts spread over ranks with tokens of their own, which are sent to their experts and back.

    All ranks issue the same three collectives in a forward and two in a backward pass, wherever their tokens go.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        num_own = _take_own_experts(module, device_mesh)
        group = device_mesh.get_group()

        def before(hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[tuple[Any, ...], _Sent]:
            order = chosen.flatten().argsort(stable=True)
            sent, received = _exchange_counts(chosen, num_own, group)
            state = _Sent(order, weights, _numbers(sent.sum(1), len(order)), _numbers(received.sum(1), len(order)))
            rows = exchange(hidden[order // chosen.shape[1]], state.received, state.counts, group)
            experts = torch.arange(num_own, device=rows.device).repeat(len(received))
            experts = experts.repeat_interleave(received.flatten(), output_size=len(rows))
            return _as_tokens(rows, experts, rows.new_ones(len(rows), dtype=weights.dtype)), state

        def after(out: Tensor, sent: _Sent) -> Tensor:
            back = exchange(out[: sum(sent.received)], sent.counts, sent.received, group)
            pairs = back[sent.order.argsort()].view(*sent.weights.shape, -1)
            return (pairs * sent.weights.unsqueeze(-1)).sum(1).to(out.dtype)

        surround(module, before, after)
        return module


@dataclass(frozen=True)
class _Sent:
    """What a rank must know to put together what comes back: the `order` in which it sent its pairs, their routing
    `weights`, and how many pairs it sent to each rank (`counts`) and had from each (`received`)."""

    order: Tensor
    weights: Tensor
    counts: list[int]
    received: list[int]


def _exchange_counts(chosen: Tensor, num_own: int, group: distributed.ProcessGroup) -> tuple[Tensor, Tensor]:
    """How many pairs this rank sends to, and has from, each rank (rows) for each of that rank's experts (columns)."""
    num_ranks, experts = group.size(), chosen.flatten()
    counts = experts.new_zeros(num_own * num_ranks).scatter_add(0, experts, torch.ones_like(experts))
    even = [num_own] * num_ranks
    received = exchange(counts, even, even, group)
    return counts.view(num_ranks, -1), received.view(num_ranks, -1)


def _numbers(counts: Tensor, total: int) -> list[int]:
    """Counts as numbers; where a trace has none, those of a router that spreads `total` evenly."""
    if not is_fake(type(counts)):
        numbers: list[int] = counts.tolist()
        return numbers
    each, remainder = divmod(total, len(counts))
    return [each + (rank < remainder) for rank in range(len(counts))]


def _positions(mask: Tensor, *, likely: int) -> Tensor:
    """Where a mask is true; where a trace has no numbers, as many places as is `likely`."""
    if is_fake(type(mask)):
        return torch.arange(likely, device=mask.device)
    return mask.nonzero().flatten()


def _take_own_experts(module: nn.Module, mesh: DeviceMesh) -> int:
    num_experts, num_ranks = int(module.num_experts), mesh.size()  # type: ignore[arg-type]
    if num_experts % num_ranks:
        raise LayoutError(f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks; allowed: a divisor")
    shard_parameters(module, mesh)
    module.num_experts = num_experts // num_ranks  # type: ignore[assignment]
    return num_experts // num_ranks


def _as_tokens(rows: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs as the arguments of Hugging Face's forward. Where there are none it gets one row of zeros, so that the
    experts' weights have a gradient, zero, on every rank."""
    if not len(rows):
        rows, experts, weights = (
            functional.pad(rows, (0, 0, 0, 1)),
            functional.pad(experts, (0, 1)),
            functional.pad(weights, (0, 1)),
        )
    return rows, experts.unsqueeze(1), weights.unsqueeze(1)
