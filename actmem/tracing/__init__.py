"""From a model to its graph, on real tensors or on none at all."""

from actmem.tracing.sharding import Sharding
from actmem.tracing.trace import trace, trace_layers, trace_stage

__all__ = ["Sharding", "trace", "trace_layers", "trace_stage"]
