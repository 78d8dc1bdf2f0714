"""Tensor parallel: each rank has some heads of each attention, some columns of each feed-forward part or some experts,
and a part of the vocabulary.

One table says which module is cut how; torch's `parallelize_module` does the rest around Hugging Face's own forwards.
With sequence parallel the residual stream between the cut parts, which every rank would otherwise hold whole, is cut
along the sequence: attention and feed-forward part gather what they read, and scatter what they sum up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from actmem.errors import LayoutError
from actmem.models.regions import find_regions
from actmem.parallel.experts import SpreadExperts
from actmem.parallel.parameters import see_parameters, summing_gradient
from actmem.parallel.vocabulary import SpreadVocabulary

WHOLE, ALONG_SEQUENCE, ALONG_VOCABULARY = Replicate(), Shard(1), Shard(-1)


class PartOfInput(ParallelStyle):
    """A module with whole parameters that is given only a part of what they apply to, some heads or some of the
    sequence: the gradients of its parameters are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        see_parameters(module, partial(summing_gradient, mesh=device_mesh))
        return module


def attention_styles(residual: Placement) -> Mapping[str, ParallelStyle]:
    """How attention is cut, by paths inside a layer. `residual` is how the residual stream is placed."""
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": residual}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": PartOfInput(),
        "self_attn.k_norm": PartOfInput(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=residual),
    }


def dense_styles(residual: Placement) -> Mapping[str, ParallelStyle]:
    """The same for a dense feed-forward part."""
    return {
        "mlp": PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(WHOLE,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=residual),
    }


def mixture_styles(residual: Placement) -> Mapping[str, ParallelStyle]:
    """The same for a mixture of experts: every rank routes all tokens, and gives the sum over its own experts."""
    return {
        "mlp": PrepareModuleInputOutput(
            input_layouts=(residual,),
            desired_input_layouts=(WHOLE,),
            use_local_input=True,
            output_layouts=(Partial(),),
            desired_output_layouts=(residual,),
        ),
        "mlp.experts": SpreadExperts(),
    }


def norm_styles() -> Mapping[str, ParallelStyle]:
    """The same for what works on the residual stream where that is cut along the sequence."""
    return {"input_layernorm": PartOfInput(), "post_attention_layernorm": PartOfInput()}


def parallelize_tensors(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> None:
    """Cut a Qwen3 or Qwen3-MoE, or some layers of one, over the ranks of `mesh`, in place. All hold the same model.

    The model is given whole sequences, and its hidden states come out whole. So do its logits; with `loss_parallel`
    they are a DTensor cut along the vocabulary, for torch's context of that name. Raises `LayoutError`.
    """
    layers = list(find_regions(model).values())
    _check(layers, mesh.size())
    residual = ALONG_SEQUENCE if sequence_parallel else WHOLE
    for layer in layers:
        styles = {**attention_styles(residual), **(norm_styles() if sequence_parallel else {})}
        styles |= mixture_styles(residual) if has_experts(layer) else dense_styles(residual)
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    if sequence_parallel:
        _cut_sequence_between(layers[0], layers[-1], mesh)
    _spread_vocabulary(model, mesh, loss_parallel=loss_parallel)


def has_experts(layer: nn.Module) -> bool:
    """Whether a decoder layer has a mixture of experts for its feed-forward part."""
    return hasattr(getattr(layer, "mlp", None), "experts")


def _cut_sequence_between(first: nn.Module, last: nn.Module, mesh: DeviceMesh) -> None:
    """Outside of these layers the sequence is whole: there positions are counted, and pipeline stages meet."""
    cut = PrepareModuleInput(input_layouts=(WHOLE,), desired_input_layouts=(ALONG_SEQUENCE,), use_local_output=True)
    join = PrepareModuleOutput(output_layouts=(ALONG_SEQUENCE,), desired_output_layouts=(WHOLE,))
    parallelize_module(first, mesh, cut)
    parallelize_module(last, mesh, join)


def _spread_vocabulary(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    embedding, head = _last_named(model, "embed_tokens"), _last_named(model, "lm_head")
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    if embedding is not None:
        parallelize_module(embedding, mesh, SpreadVocabulary())
    if head is not None:
        logits = ALONG_VOCABULARY if loss_parallel else WHOLE
        style = ColwiseParallel(output_layouts=logits, use_local_output=not loss_parallel)
        parallelize_module(head, mesh, style, src_data_rank=None)
    if tied and embedding is not None and head is not None:
        head.weight = embedding.weight


def _last_named(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this name; ``None`` where a pipeline stage has none."""
    return next((module for path, module in model.named_modules() if path.split(".")[-1] == name), None)


def _check(layers: list[nn.Module], num_ranks: int) -> None:
    unknown = {
        type(layer).__name__ for layer in layers if not isinstance(layer, (Qwen3DecoderLayer, Qwen3MoeDecoderLayer))
    }
    if unknown:
        raise LayoutError(
            f"tensor parallel does not know how to cut {', '.join(sorted(unknown))}; it knows the layers of Qwen3 and "
            "Qwen3-MoE; set tp_size: 1"
        )
    sizes = dict[str, int]()
    for layer in layers:
        attention: Any = layer.self_attn
        names = [
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts" if has_experts(layer) else "intermediate_size",
        ]
        sizes |= {name: getattr(attention.config, name) for name in names}
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % num_ranks]
    if uneven:
        raise LayoutError(
            f"{', '.join(uneven)} cannot be cut evenly over {num_ranks} tensor parallel ranks; allowed: a tp_size that "
            "divides them"
        )
