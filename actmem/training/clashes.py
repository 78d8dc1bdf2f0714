"""Whether the sections of a configuration recompute and swap one op: found out before training, on fake tensors."""

from __future__ import annotations

from actmem.config.schema import RunConfig
from actmem.errors import ApplyError
from actmem.planning.clashes import may_clash, refuse_clashes
from actmem.training.traced import trace_run


def refuse_clashing_sections(config: RunConfig) -> None:
    """Raise `ConfigError` for settings that recompute and swap one op of the model, with the op and its layers.

    Of a model whose ops depend on its numbers, or on the ranks it is spread over, the run itself tells the rest.
    """
    if not may_clash(config):
        return
    try:
        graph = trace_run(config)
    except ApplyError:
        return
    refuse_clashes(config, graph)
