"""The next-token loss, with whole logits or in chunks of rows.

At a vocabulary of 150,000 the logits and their gradient can exceed what all layers save. The chunked loss works out
the gradients of a few rows while it has their logits, in the forward pass, and keeps only those gradients: that of the
hidden states and that of the head's weight. It is the method of Liger-Kernel's and of torch 2.13's
`linear_cross_entropy`; the latter returns a bfloat16 loss for bfloat16 states (a step of 0.06 at a loss of 10) and on
the CPU takes more memory for them than whole logits do, so it does not serve.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from actmem.config.schema import ParallelConfig
from actmem.training.packing import Batch

IGNORED = -100
# Rows in a chunk: with fewer, reading the head's weight and adding to its gradient takes longer than the products.
_LEAST_ROWS = 128


@dataclass(frozen=True)
class Loss:
    """Float32 scalars: the `cross_entropy` of a micro-batch, as a share, and its `router` loss, weighted, or None."""

    cross_entropy: Tensor
    router: Tensor | None

    def total(self) -> Tensor:
        """What to call `backward` on."""
        return self.cross_entropy if self.router is None else self.cross_entropy + self.router

    def detached(self) -> Loss:
        """The same numbers without their graph."""
        return Loss(self.cross_entropy.detach(), None if self.router is None else self.router.detach())


def next_token_loss(
    model: PreTrainedModel, batch: Batch, *, num_targets: int, kind: Literal["standard", "chunked"]
) -> Loss:
    """The loss of `batch` as its share of a group of micro-batches with `num_targets` targets in all.

    The cross-entropy is summed over the targets that are not -100 and divided by `num_targets`, so that the sum over
    the group is the mean over its tokens, however they are spread. A mixture of experts adds Hugging Face's auxiliary
    loss times `router_aux_loss_coef`, weighted with the batch's share of the targets.
    """
    outputs = model.base_model(input_ids=batch.inputs, use_cache=False)
    summed = states_loss(model, outputs.last_hidden_state, batch.targets, kind=kind)
    router_logits = getattr(outputs, "router_logits", None)
    if not router_logits:
        return Loss(summed / num_targets, None)
    share = (batch.targets != IGNORED).sum() / num_targets
    return Loss(summed / num_targets, share * _router_loss(model, router_logits))


def states_loss(
    model: PreTrainedModel, states: Tensor, targets: Tensor, *, kind: Literal["standard", "chunked"]
) -> Tensor:
    """The cross-entropy, summed over the targets, of hidden states under the head of `model`."""
    hidden, targets = states.flatten(0, 1), targets.flatten()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if kind == "chunked":
        return chunked_cross_entropy(hidden, head.weight, targets)
    return functional.cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")


def plain(loss: Tensor) -> Tensor:
    """A loss that was worked out on logits cut along the vocabulary is a distributed tensor, the same on all ranks."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def spread_logits(parallel: ParallelConfig) -> AbstractContextManager[Any]:
    """The context in which logits may be cut along the vocabulary, for forward and backward passes alike."""
    return loss_parallel() if parallel.loss_parallel and parallel.tp_size > 1 else nullcontext()


def _router_loss(model: PreTrainedModel, router_logits: Any) -> Tensor:
    config = model.config
    balance = load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok)
    assert isinstance(balance, Tensor)
    return balance * float(config.router_aux_loss_coef)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum over rows of ``cross_entropy(hidden @ weight.T, targets)``, without ever holding all logits.

    `hidden` is (rows, features), `weight` (vocabulary, features), `targets` (rows) int64, where -100 counts nothing.
    Returns a float32 scalar. A chunk of logits has about as many elements as `hidden`, and at least 128 rows. Under
    autocast the product is in autocast's dtype, as that of a linear layer. Gradients of gradients are not supported.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if not torch.is_grad_enabled():  # inside the function it is off either way
        hidden, weight = hidden.detach(), weight.detach()
    result = _ChunkedCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows, features = hidden.shape
        num_chunks = -(-rows // max(_LEAST_ROWS, rows * features // weight.shape[0]))
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # Accumulated over chunks, so in float32 whatever the dtype of the weight.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunks = zip(hidden.tensor_split(num_chunks), targets.tensor_split(num_chunks), strict=True)
        start = 0
        for states, labels in chunks:
            logits = states @ weight.T
            losses, logits_grad = _cross_entropy_and_gradient(logits, labels)
            total += losses
            if hidden_grad is not None:
                torch.mm(logits_grad, weight, out=hidden_grad[start : start + len(states)])
            if weight_grad is not None:
                _add_product(weight_grad, logits_grad.T, states)
            start += len(states)
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        # In place: a second gradient as large as the head would be a peak of its own. A second backward pass through
        # the same graph is caught by autograd's version check.
        return _scaled(hidden_grad, grad), _scaled(weight_grad, grad), None


def _cross_entropy_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of (rows, vocabulary) `logits` and its gradient by them, in their dtype."""
    counted = (targets != IGNORED).unsqueeze(1)
    index = targets.clamp_min(0).unsqueeze(1)
    values = logits.float()
    log_probabilities = values - values.logsumexp(1, keepdim=True)
    loss = -(log_probabilities.gather(1, index) * counted).sum()
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    return loss, gradient.mul_(counted).to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, without a temporary as large as `total` where the dtypes allow."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.mul_(factor)
