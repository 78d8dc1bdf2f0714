"""From a model to its graph, on real tensors or on none at all."""

from actmem.tracing.trace import trace

__all__ = ["trace"]
