"""The paths of the ops in the layers of Qwen3: dense and mixture of experts, fused and eager attention, with biases and
without, in one dtype and in several, on one rank and on many.

They tell, before there is a model, how long a pattern takes. The paths of a run are those of its trace.
"""

from __future__ import annotations

from collections.abc import Iterator

from actmem.config.op_names import COLLECTIVES

# A module (a dot: the layer itself) and its ops; `mul*2` stands for `mul` and `mul#1`.
_LAYERS = """
. add*2
input_layernorm pow mean add rsqrt mul*2 _to_copy*2
self_attn view*8 transpose*5 unsqueeze*4 mul*5 slice*4 neg*2 cat*2 add*3 scaled_dot_product_attention
self_attn expand*6 clone*3 _unsafe_view*4 bmm*2 _softmax _to_copy*2
self_attn.q_proj t view*2 mm addmm _unsafe_view _to_copy*3
self_attn.k_proj t view*2 mm addmm _unsafe_view _to_copy*3
self_attn.v_proj t view*2 mm addmm _unsafe_view _to_copy*3
self_attn.o_proj t view*2 mm addmm _unsafe_view _to_copy*3
self_attn.q_norm pow mean add rsqrt mul*2 _to_copy*2
self_attn.k_norm pow mean add rsqrt mul*2 _to_copy*2
post_attention_layernorm pow mean add rsqrt mul*2 _to_copy*2
mlp mul view*2
mlp.gate_proj t view mm _unsafe_view _to_copy*2
mlp.up_proj t view mm _unsafe_view _to_copy*2
mlp.down_proj t view mm _unsafe_view _to_copy*2
mlp.act_fn silu
mlp.gate view t mm _softmax topk sum clone div_ _to_copy*4
mlp.experts view*4 sort floor_divide index*4 _to_copy histc cumsum transpose*2 _grouped_mm*2 split*2 mul*4 unsqueeze*4
mlp.experts empty_like detach*2 arange index_put_ sum expand clone bmm*2 squeeze*2
mlp.experts.act_fn silu
"""
_SPREAD = (".", "self_attn", "mlp", "mlp.experts")  # what speaks with other ranks
_COLLECTIVES = " ".join(COLLECTIVES)


def _paths() -> Iterator[str]:
    for line in (*_LAYERS.strip().splitlines(), *(f"{module} {_COLLECTIVES}" for module in _SPREAD)):
        module, *ops = line.split()
        prefix = "" if module == "." else f"{module}."
        for op in ops:
            name, _, count = op.partition("*")
            yield from (
                f"{prefix}{name}#{number}" if number else f"{prefix}{name}" for number in range(int(count or 1))
            )


KNOWN_PATHS: tuple[str, ...] = tuple(_paths())
