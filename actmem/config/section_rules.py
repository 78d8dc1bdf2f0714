"""The rules of the sections `recompute`, `recompute_comm` and `swap`: what each needs, which layers and patterns are
allowed, and that nothing is both recomputed and swapped.

Layers and patterns are checked whether or not their section is switched on, so that switching it on brings no surprise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from actmem.config.complaint import Complaint, Rule
from actmem.config.layers import bad_entries, span_of
from actmem.config.overlaps import ALLOWED_FATES, overlaps
from actmem.config.patterns import problems_of
from actmem.config.schema import RunConfig, SwapConfig
from actmem.config.settings import COMM, FULL, LAYER_FIELDS, LAYER_SWAP, OP_SWAP, SELECT, patterns_in, settings_in
from actmem.config.shown import quoted
from actmem.config.sizes import num_layers

_ALLOWED_LAYERS = "numbers and ranges such as [0-15, 20], strictly ascending, without overlap"
_MODEL = ("model.name", "model.path", "model.config")


def _full_needs_layers(config: RunConfig) -> Iterator[Complaint]:
    if config.recompute.mode == "full" and config.recompute.full_recompute_layer is None:
        yield Complaint("recompute.mode", f"full needs {FULL}", "full", f"{FULL}, such as [0-15]")


def _select_needs_modules(config: RunConfig) -> Iterator[Complaint]:
    if config.recompute.mode == "select" and not config.recompute.select_module:
        yield Complaint("recompute.mode", f"select needs {SELECT}", "select", f"{SELECT}, such as {{'.*mlp': [0-15]}}")


def _comm_needs_modules(config: RunConfig) -> Iterator[Complaint]:
    if config.recompute_comm.enable and not config.recompute_comm.select_module:
        allowed = f"{COMM}, such as {{'.*\\.all_gather': [0-3]}}"
        yield Complaint("recompute_comm.enable", f"true needs {COMM}", True, allowed)


def _swap_needs_entries(config: RunConfig) -> Iterator[Complaint]:
    if config.swap.enable and not config.swap.layer_swap and not config.swap.op_swap:
        allowed = f"{LAYER_SWAP}, such as [{{layers: [0-3]}}], or {OP_SWAP}"
        yield Complaint("swap.enable", f"true needs {LAYER_SWAP} or {OP_SWAP}", True, allowed)


def _well_written(field: str, config: RunConfig) -> Iterator[Complaint]:
    for setting in settings_in(config, field):
        if not setting.entries:
            yield Complaint(field, "names no layer", (), _ALLOWED_LAYERS, setting.inside)
        for index, problem in bad_entries(setting.entries):
            inside = (*setting.inside, index)
            yield Complaint(field, problem, setting.entries[index], _ALLOWED_LAYERS, inside)


def _within_model(field: str, config: RunConfig) -> Iterator[Complaint]:
    count = num_layers(config.model)
    if count is not None:
        for inside, entry, last in _last_layers(config, field):
            if last >= count:
                problem = f"{entry!r} is beyond the last layer, {count - 1}"
                yield Complaint(field, problem, entry, f"layers from 0 to {count - 1}", inside)


def _prefetch_within_model(config: RunConfig) -> Iterator[Complaint]:
    count, prefetch = num_layers(config.model), config.swap.default_prefetch
    matters = config.swap.enable or prefetch != SwapConfig().default_prefetch
    if count is not None and matters and prefetch >= count:
        allowed = f"1 to {count - 1}, num_layers - 1" if count > 1 else "nothing: swap needs a model of two layers"
        yield Complaint("swap.default_prefetch", f"{prefetch} is out of range", prefetch, allowed)


def _prefetched_within_model(field: str, config: RunConfig) -> Iterator[Complaint]:
    count, prefetch = num_layers(config.model), config.swap.default_prefetch
    if count is None or prefetch >= count:
        return
    for inside, entry, last in _last_layers(config, field):
        if count - prefetch <= last < count:
            problem = f"{entry!r} and default_prefetch {prefetch} reach layer {last + prefetch} of {count}"
            allowed = f"layers up to {count - prefetch - 1}, num_layers - default_prefetch - 1"
            yield Complaint(field, problem, entry, allowed, inside)


def _last_layers(config: RunConfig, field: str) -> Iterator[tuple[tuple[str | int, ...], object, int]]:
    """Place, entry and last layer of each entry of a field that can be read."""
    for setting in settings_in(config, field):
        for index, entry in enumerate(setting.entries):
            try:
                yield (*setting.inside, index), entry, span_of(entry)[1]
            except ValueError:
                continue


def _sound_patterns(field: str, config: RunConfig) -> Iterator[Complaint]:
    problems = problems_of(patterns_in(config))
    for setting in settings_in(config, field):
        if setting.pattern is None:
            continue
        problem = problems[setting.pattern] if setting.pattern else "is empty, and matches no path"
        if problem is not None:
            allowed = "a regex over the whole path of a module or op inside the layer, such as '.*mlp'"
            yield Complaint(field, f"{quoted(setting.pattern)} {problem}", setting.pattern, allowed, setting.pattern_at)


def _one_fate(config: RunConfig) -> Iterator[Complaint]:
    for overlap in overlaps(config):
        problem = f"is also recomputed, by {overlap.recomputed.name}: {overlap.where}"
        swapped = overlap.swapped
        yield Complaint(swapped.field, problem, swapped.pattern or swapped.entries, ALLOWED_FATES, swapped.inside)


SECTION_RULES = (
    Rule(("recompute.mode", FULL), _full_needs_layers),
    Rule(("recompute.mode", SELECT), _select_needs_modules),
    Rule(("recompute_comm.enable", COMM), _comm_needs_modules),
    Rule(("swap.enable", LAYER_SWAP, OP_SWAP), _swap_needs_entries),
    *(Rule((field,), partial(_well_written, field)) for field in LAYER_FIELDS),
    *(Rule((field, *_MODEL), partial(_within_model, field)) for field in LAYER_FIELDS),
    Rule(("swap.enable", "swap.default_prefetch", *_MODEL), _prefetch_within_model),
    *(
        Rule((field, "swap.default_prefetch", *_MODEL), partial(_prefetched_within_model, field))
        for field in (LAYER_SWAP, OP_SWAP)
    ),
    *(Rule((field,), partial(_sound_patterns, field)) for field in LAYER_FIELDS),
    Rule((), _one_fate),  # it looks at what is sound of the settings, whatever else is wrong with them
)
