"""Tensor parallel: each rank has some heads of each attention, some columns of each feed-forward part or some experts,
and a part of the vocabulary.

One table says which module is cut how; torch's `parallelize_module` does the rest around Hugging Face's own forwards.
With sequence parallel the residual stream between the cut parts, which every rank would otherwise hold whole, is cut
along the sequence: attention and feed-forward part gather what they read, and scatter what they sum up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
from transformers import PreTrainedModel

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
    model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> None:
    """Cut a Qwen3 or Qwen3-MoE, or some layers of one, over the ranks of `mesh`, in place. All hold the same model.

    The model is given whole sequences, and its hidden states come out whole. So do its logits; with `loss_parallel`
    they are a DTensor cut along the vocabulary, for torch's context of that name. Raises `LayoutError`.
    """
    _check(model, mesh.size())
    residual = ALONG_SEQUENCE if sequence_parallel else WHOLE
    layers = list(find_regions(model).values())
    for layer in layers:
        styles = dict(attention_styles(residual))
        styles |= mixture_styles(residual) if hasattr(layer.mlp, "experts") else dense_styles(residual)
        styles |= norm_styles() if sequence_parallel else {}
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    if sequence_parallel:
        parallelize_module(
            layers[0],
            mesh,
            PrepareModuleInput(input_layouts=(WHOLE,), desired_input_layouts=(ALONG_SEQUENCE,), use_local_output=True),
        )
        parallelize_module(
            layers[-1],
            mesh,
            PrepareModuleOutput(output_layouts=(ALONG_SEQUENCE,), desired_output_layouts=(WHOLE,)),
        )
    _spread_vocabulary(model, mesh, loss_parallel=loss_parallel)


def _spread_vocabulary(model: PreTrainedModel, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    if embedding is not None:
        parallelize_module(embedding, mesh, SpreadVocabulary())
    if head is not None:
        logits = ALONG_VOCABULARY if loss_parallel else WHOLE
        style = ColwiseParallel(output_layouts=logits, use_local_output=not loss_parallel)
        parallelize_module(head, mesh, style, src_data_rank=None)
    if tied:
        head.weight = embedding.weight


def _check(model: PreTrainedModel, num_ranks: int) -> None:
    config = model.config
    sizes = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    if any(hasattr(layer.mlp, "gate_proj") for layer in find_regions(model).values()):
        sizes["intermediate_size"] = config.intermediate_size
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % num_ranks]
    if uneven:
        raise LayoutError(
            f"{', '.join(uneven)} cannot be cut evenly over {num_ranks} tensor parallel ranks; allowed: a tp_size that "
            "divides them"
        )
