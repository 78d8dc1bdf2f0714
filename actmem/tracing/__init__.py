"""From a model to its graph, on real tensors or on none at all."""

from actmem.tracing.trace import trace, trace_layers

__all__ = ["trace", "trace_layers"]
