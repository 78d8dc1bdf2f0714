"""Settings of the sections `recompute`, `recompute_comm`, `swap` and `parallel` that have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from actmem.config.schema import RunConfig, Section
from actmem.errors import Fault

_TENSOR_PARALLEL = ("sequence_parallel", "loss_parallel")
_PIPELINE = ("pp_schedule", "pp_microbatches", "pp_layers")


def idle_sections(config: RunConfig) -> Iterator[Fault]:
    """A warning for each setting that is there, while the switch of its section says that it does not count."""
    mode = config.recompute.mode
    if mode == "None":
        yield from _idle("recompute", config.recompute, "mode", "while recompute.mode is None")
    elif mode == "full" and config.recompute.select_module:
        value = config.recompute.select_module
        yield Fault("recompute.select_module", "has no effect while recompute.mode is full", value, "mode: select")
    if not config.recompute_comm.enable:
        yield from _idle("recompute_comm", config.recompute_comm, "enable", "while recompute_comm.enable is false")
    if not config.swap.enable:
        counts = {"default_prefetch"} if config.activation_swap != "none" else set()
        yield from _idle("swap", config.swap, "enable", "while swap.enable is false", counts)
    if config.allow_unverified_model and config.activation_swap == "none":
        problem = "has no effect while activation_swap is none"
        yield Fault("allow_unverified_model", problem, True)
    if config.parallel.tp_size == 1:
        yield from _given("parallel", config.parallel, _TENSOR_PARALLEL, "while parallel.tp_size is 1")
    if config.parallel.pp_size == 1:
        yield from _given("parallel", config.parallel, _PIPELINE, "while parallel.pp_size is 1")


def _idle(name: str, section: Section, switch: str, reason: str, counts: Set[str] = frozenset()) -> Iterator[Fault]:
    fields = [field for field in type(section).model_fields if field != switch and field not in counts]
    yield from _given(name, section, fields, reason)


def _given(name: str, section: Section, fields: Iterable[str], reason: str) -> Iterator[Fault]:
    for field in fields:
        value = getattr(section, field)
        if field in section.model_fields_set and value:
            yield Fault(f"{name}.{field}", f"has no effect {reason}", value)
