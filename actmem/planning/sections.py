"""From the sections `activation_swap`, `recompute`, `recompute_comm` and `swap` of a configuration to a plan.

A sound configuration recomputes and swaps nothing twice, so the order of the rules settles three things only: what
`exclude_op` names is saved although its layer is recomputed; `recompute_comm` has its way even then; and nothing that
`exclude_op` names is kept from being swapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from actmem.config.layers import to_ranges
from actmem.config.op_names import COLLECTIVES, FAMILIAR_NAMES
from actmem.config.overlaps import ATTENTION_PATTERN
from actmem.config.schema import RunConfig
from actmem.config.settings import (
    COMM,
    EXCLUDE,
    FULL,
    LAYER_SWAP,
    OP_SWAP,
    SELECT,
    Setting,
    settings_in_effect,
)
from actmem.config.ways import used_sections
from actmem.errors import PlanError
from actmem.planning.plan import Action, Plan, Reach, Rule

WHOLE_LAYER = ".*"
_ATTENTION = "activation_swap"


def plan_of(config: RunConfig) -> str | Path | Plan:
    """What `actmem.apply` runs a configuration with: its plan file, its policy's name, or the plan of its sections.

    Raises `PlanError` for a memory budget, whose plan only a planner can find.
    """
    if config.memory_budget is not None:
        raise PlanError(
            f"memory_budget: {config.memory_budget} needs a plan that is made for it first: actmem plan CONFIG writes "
            "one, and in Python actmem.plan(actmem.trace(model, batch), memory_budget=...) gives one to apply"
        )
    if config.plan is not None or config.policy is not None:
        return config.plan or config.policy or "none"
    return plan_of_sections(config) if used_sections(config) else "none"


def way_of(config: RunConfig) -> str:
    """The setting that says what becomes of activations; the first, where the sections say it together."""
    ways = {"memory_budget": config.memory_budget, "plan": config.plan, "policy": config.policy}
    return next((way for way, value in ways.items() if value is not None), next(iter(used_sections(config)), "policy"))


def name_of(plan: str | Path | Plan) -> str:
    """The name of what `plan_of` gives, for a person to read."""
    return plan.name if isinstance(plan, Plan) else str(plan)


def plan_of_sections(config: RunConfig) -> Plan:
    """The plan that the sections of a sound configuration describe, as far as they are switched on."""
    rules = tuple(rule for rule, _ in _rules_and_settings(config))
    return Plan(_name(config), rules, prefetch=config.swap.default_prefetch, one_fate=True)


def recomputed_layers(config: RunConfig) -> tuple[int, ...]:
    """The layers in which `recompute` recomputes anything."""
    return _union(setting.layers for setting in settings_in_effect(config, FULL, SELECT))


def excluded_names(config: RunConfig) -> list[Setting]:
    """The entries of a list in `exclude_op`, each as a setting of all layers in which anything is recomputed."""
    excluded, layers = config.recompute.exclude_op, recomputed_layers(config)
    if not isinstance(excluded, tuple) or not layers:
        return []
    return [Setting(EXCLUDE, (), layers, text, (index,)) for index, text in enumerate(excluded)]


def settings_of_rules(config: RunConfig) -> dict[tuple[Rule, str | None], Setting]:
    """The settings that are in effect, by their rules in the plan of the sections and the labels of those; of several
    with equal ones, the first."""
    return {(rule, rule.label): setting for rule, setting in reversed([*_rules_and_settings(config)])}


def pattern_of_excluded(text: str) -> str:
    """A regex for the paths of all ops whose own or familiar name holds `text`, in upper or lower case.

    ATen's own way of writing, ``aten::mm.default``, and MindSpore's, ``InnerCommAllGather``, are understood; its own
    ``InnerComm`` alone means every collective.
    """
    if text.lower() == "innercomm":
        return rf"(?:.*\.)?(?:{'|'.join(COLLECTIVES)})[^.#]*(?:#\d+)?"
    part = text.lower().removeprefix("innercomm").removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    if "." in part or "#" in part:  # no name holds these
        return "(?!)"
    meant = {name for familiar, names in FAMILIAR_NAMES.items() if part in familiar.lower() for name in names}
    names = [
        rf"[^.#]*{re.escape(part)}[^.#]*",
        *(rf"{re.escape(name)}[^.#]*" for name in sorted(meant) if part not in name),
    ]
    return rf"(?i)(?:.*\.)?(?:{'|'.join(names)})(?:#\d+)?"


def _rules_and_settings(config: RunConfig) -> Iterator[tuple[Rule, Setting]]:
    """Every rule of the sections, in order, with the setting that asks for it."""
    for setting in settings_in_effect(config, SELECT):
        yield _rule(setting, Action.RECOMPUTE, "below"), setting
    for setting in settings_in_effect(config, FULL):
        yield _rule(setting, Action.RECOMPUTE), setting
    yield from _excluding_rules(config)
    for setting in settings_in_effect(config, COMM):
        yield _rule(setting, Action.RECOMPUTE, "communication"), setting
    yield from _swap_rules(config)


def _excluding_rules(config: RunConfig) -> Iterator[tuple[Rule, Setting]]:
    layers = recomputed_layers(config)
    for setting in settings_in_effect(config, EXCLUDE):
        # Where it speaks of no recomputed layer at all, the rule stays, so that it can be told to do nothing.
        both = tuple(layer for layer in setting.layers if layer in layers) or setting.layers
        yield replace(_rule(setting, Action.SAVE, "below"), layers=both), setting
    for setting in excluded_names(config):
        yield replace(_rule(setting, Action.SAVE), pattern=pattern_of_excluded(setting.pattern or "")), setting


def _swap_rules(config: RunConfig) -> Iterator[tuple[Rule, Setting]]:
    if config.activation_swap == "attention":
        rule = Rule(rf"{ATTENTION_PATTERN}\..*", Action.SWAP, label=_ATTENTION)
        yield rule, Setting(_ATTENTION, (), (config.activation_swap,))
    for setting in settings_in_effect(config, OP_SWAP):
        yield _rule(setting, Action.SWAP, "below"), setting
    whole = settings_in_effect(config, LAYER_SWAP)
    if whole:
        yield Rule(WHOLE_LAYER, Action.SWAP, _union(each.layers for each in whole), label=LAYER_SWAP), whole[0]


def _rule(setting: Setting, action: Action, reach: Reach = "op") -> Rule:
    return Rule(setting.pattern or WHOLE_LAYER, action, setting.layers, reach=reach, label=setting.name)


def _name(config: RunConfig) -> str:
    """Such as ``recompute full 0-1 + swap 2``."""
    parts = []
    if config.recompute.mode != "None":
        parts.append(f"recompute {config.recompute.mode} {_ranges(recomputed_layers(config))}")
    if config.recompute_comm.enable:
        comm = _union(setting.layers for setting in settings_in_effect(config, COMM))
        parts.append(f"recompute_comm {_ranges(comm)}")
    if config.activation_swap != "none":
        parts.append(f"activation_swap {config.activation_swap}")
    if config.swap.enable:
        swapped = _union(setting.layers for setting in settings_in_effect(config, LAYER_SWAP, OP_SWAP))
        parts.append(f"swap {_ranges(swapped)}")
    return " + ".join(parts)


def _ranges(layers: tuple[int, ...]) -> str:
    return ", ".join(to_ranges(layers))


def _union(layers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({layer for each in layers for layer in each}))
