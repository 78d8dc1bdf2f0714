"""`actmem.apply`: put a model under a plan, and take it off again."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from weakref import WeakKeyDictionary

import torch
from torch import nn

from actmem._compat import is_compiled, spread_over
from actmem.config.loading import parse_memory, parse_sections, parse_sections_and_memory
from actmem.config.platforms import refuse_other_platforms
from actmem.config.schema import MemoryConfig, RunConfig
from actmem.errors import ApplyError, PlanError
from actmem.graph import RegionGraph
from actmem.planning import POLICIES, Fingerprint, Plan
from actmem.planning.planner import Planned
from actmem.planning.sections import plan_of
from actmem.runtime.attention_swap import check_attention_swap
from actmem.runtime.engine import Engine, PlanRules, PolicyRules, RuleSource, active_tape
from actmem.runtime.functions import FunctionWrappers
from actmem.runtime.intercept import Interception, Runner, is_planned
from actmem.runtime.region import PlannedRegion
from actmem.runtime.stats import Stats, collect
from actmem.runtime.swap.building import build_swapper
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.swapper import Swapper
from actmem.runtime.yardsticks import YARDSTICKS

_functions = FunctionWrappers()
_attention_swaps: WeakKeyDictionary[nn.Module, tuple[object, Applied]] = WeakKeyDictionary()
"""Models under `activation_swap: attention`, with what was asked for."""


class Applied:
    """A model under a plan. Use it as a context manager, or call `remove` to take the plan off."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        runners: dict[str, Runner],
        regions: dict[str, nn.Module],
        engine: Engine | None = None,
    ) -> None:
        self.name = name
        self._runners = runners
        self._engine = engine
        self._made_for = fingerprint(model, regions)
        _functions.install(active_tape)
        interception = Interception({regions[name]: runner for name, runner in runners.items()})
        self._finish = weakref.finalize(model, _take_off, interception)

    @property
    def stats(self) -> Stats:
        """What the plan did so far; without regions for torch's own ways of recomputing, which do not tell."""
        regions = [runner.stats for runner in self._runners.values() if isinstance(runner, PlannedRegion)]
        return collect(regions, SwapCounters() if self.swapper is None else self.swapper.counters)

    @property
    def swaps(self) -> bool:
        """Whether the plan can move values away from the device."""
        return self.swapper is not None

    @property
    def swapper(self) -> Swapper | None:
        """What moves them, for a `PipelineSwaps`."""
        return None if self._engine is None else self._engine.swapper

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the modules whose calls run under the plan, in order."""
        return tuple(self._runners)

    @property
    def graphs(self) -> dict[str, RegionGraph]:
        """What each region does, by the region's name; regions that have not been called yet are left out."""
        planned = {name: runner for name, runner in self._runners.items() if isinstance(runner, PlannedRegion)}
        return {name: runner.graph for name, runner in planned.items() if runner.graph is not None}

    @property
    def plan(self) -> Plan:
        """The plan in force, for `Plan.save`: rules of the layers called so far, and what they were made for."""
        if self._engine is None:
            raise PlanError(f"{self.name} is torch's own way of recomputing: it follows no plan of ours")
        if not self._engine.has_run:
            raise PlanError(
                f"{self.name} has no rules yet: they are made when the layers first run; run one step first"
            )
        return self._engine.plan(self._made_for)

    def remove(self) -> None:
        """Restore the model exactly; graphs built before still run their backward pass. May be called twice."""
        self._finish()
        for model, (_, applied) in list(_attention_swaps.items()):
            if applied is self:
                del _attention_swaps[model]

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _take_off(interception: Interception) -> None:
    interception.remove()
    _functions.uninstall()


def apply(
    model: nn.Module,
    plan: str | Path | Plan | Planned | Mapping[str, object] | RunConfig,
    *,
    regions: Sequence[nn.Module | str] | None = None,
    memory: MemoryConfig | Mapping[str, object] | None = None,
    layers: Sequence[int] | None = None,
) -> Applied:
    """Run the layers of `model` under a plan from now on.

    `plan` is the name of a policy (``none``, ``full``, ``mlp``, ``selective``, ``attention-swap``, ``layer-swap``;
    ``torch-full`` and ``torch-sac`` are torch's own ways, for comparison), a `Plan`, what `actmem.plan` found, the path
    of a plan file, a mapping with the sections ``activation_swap``, ``recompute``, ``recompute_comm`` and ``swap``, or
    a whole configuration. `regions` are the modules, or their names, whose calls get a tape each; by default the
    decoder layers of a Hugging Face model. `memory` are the settings of the `memory` section: where swapped values go,
    and how the plan is guarded. Where `model` is a part of another, such as the stages of a pipeline that one rank has,
    `layers` are the numbers that its regions have there, and the plan is one for the whole.

    Asked for ``activation_swap: attention`` again, with the same settings, it changes nothing and returns what it
    returned the first time. Raises `ApplyError` for a model that cannot be planned or a tier that cannot be had,
    `PlanError` for a plan that is malformed or made for another model, `ConfigError` for wrong settings, and
    `PlatformError` for another platform than torch. Then the model is untouched. While the model runs, rules that do
    nothing are told by a `NoEffectWarning`, and what should be swapped and stays by a `SwapWarning`; a swapped value
    that cannot be had back is a `SwapError`.
    """
    if isinstance(plan, Planned):
        plan = plan.plan
    if isinstance(plan, RunConfig) and memory is None:
        memory = plan.memory
    found = _find(model, regions)
    if layers is not None and len(layers) != len(found):
        raise ApplyError(
            f"{len(layers)} layer numbers are given for the {len(found)} regions of {type(model).__name__}"
        )
    num_layers = len(found) if layers is None else None
    if isinstance(plan, Mapping) and not isinstance(memory, MemoryConfig):
        plan, settings = parse_sections_and_memory(plan, num_layers, memory or {})
    else:
        plan = parse_sections(plan, num_layers) if isinstance(plan, Mapping) else plan
        settings = memory if isinstance(memory, MemoryConfig) else parse_memory(memory or {})
    if isinstance(plan, RunConfig):
        return _apply_config(model, plan, found, settings, layers)
    return _apply_plan(model, plan, found, settings, layers)


def _apply_config(
    model: nn.Module,
    config: RunConfig,
    regions: dict[str, nn.Module],
    memory: MemoryConfig,
    layers: Sequence[int] | None,
) -> Applied:
    refuse_other_platforms(config)
    plan = plan_of(config)
    if config.activation_swap == "none":
        return _apply_plan(model, plan, regions, memory, layers)
    asked = (plan, tuple(regions), memory)
    earlier = _attention_swaps.get(model)
    if earlier is not None and earlier[0] == asked:
        return earlier[1]
    check_attention_swap(model, regions, allow_unverified=config.allow_unverified_model)
    applied = _apply_plan(model, plan, regions, memory, layers)
    _attention_swaps[model] = (asked, applied)
    return applied


def _apply_plan(
    model: nn.Module,
    plan: str | Path | Plan,
    regions: dict[str, nn.Module],
    memory: MemoryConfig,
    layers: Sequence[int] | None,
) -> Applied:
    _refuse_conflicts(model, regions)
    if isinstance(plan, str) and plan in YARDSTICKS:
        return Applied(plan, model, dict.fromkeys(regions, YARDSTICKS[plan]()), regions)
    source = rule_source(plan)
    kinds = {name: region_kind(module) for name, module in regions.items()}
    if isinstance(source, PlanRules):
        _check_plan(source.plan, fingerprint(model, regions), layers)
    engine = Engine(model, source, len(regions), memory, _swapper(model, source, memory))
    numbered = zip(range(len(regions)) if layers is None else layers, regions, strict=True)
    planned = {name: PlannedRegion(name, layer, kinds[name], engine) for layer, name in numbered}
    return Applied(source.name, model, dict(planned), regions, engine)


def _swapper(model: nn.Module, source: RuleSource, memory: MemoryConfig) -> Swapper | None:
    """What moves values away, where the plan may ask for it and the model has a device."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if not source.may_swap or device.type == "meta":
        return None
    return build_swapper(memory, device, source.tiers, source.prefetch)


def rule_source(plan: str | Path | Plan) -> RuleSource:
    """Where the rules of a policy, a plan or a plan file come from. Raises `PlanError`."""
    if isinstance(plan, Plan):
        return PlanRules(plan)
    if isinstance(plan, str) and plan in POLICIES:
        return PolicyRules(plan, POLICIES[plan])
    if isinstance(plan, (str, Path)) and Path(plan).is_file():
        return PlanRules(Plan.load(plan))
    known = ", ".join([*POLICIES, *YARDSTICKS])
    raise PlanError(f"{str(plan)!r} is neither a policy nor the path of a plan file; policies: {known}")


def _find(model: nn.Module, regions: Sequence[nn.Module | str] | None) -> dict[str, nn.Module]:
    if regions is None:
        from actmem.models.regions import find_regions

        return find_regions(model)
    if isinstance(regions, str | nn.Module) or not isinstance(regions, Iterable):
        raise ApplyError(f"regions is a {type(regions).__name__}; allowed: a list of modules, or of their names")
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    wanted = [each if isinstance(each, str) else names.get(id(each)) for each in regions]
    unknown = [each for each, name in zip(regions, wanted, strict=True) if name not in modules]
    if unknown or not wanted:
        raise ApplyError(f"regions {unknown} are not modules of {type(model).__name__}; see model.named_modules()")
    return {name: modules[name] for name in dict.fromkeys(name for name in wanted if name is not None)}


def _refuse_conflicts(model: nn.Module, regions: dict[str, nn.Module]) -> None:
    compiled = [name or type(model).__name__ for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        raise ApplyError(
            f"{', '.join(compiled[:3])} went through torch.compile; a plan needs the model as it was before"
        )
    inside = {name: {id(each) for each in module.modules()} for name, module in regions.items()}
    nested = [(a, b) for a in regions for b, module in regions.items() if a != b and id(module) in inside[a]]
    if nested:
        raise ApplyError(f"region {nested[0][1]} lies inside region {nested[0][0]}; name only one of them")
    checkpointed = [name for name, module in regions.items() if getattr(module, "gradient_checkpointing", False)]
    if checkpointed:
        raise ApplyError(
            f"Hugging Face gradient checkpointing is on in {len(checkpointed)} layers ({checkpointed[0]}, …), so they "
            "would be recomputed twice: turn it off first (model.gradient_checkpointing_disable(), named "
            "activation_checkpointing_disable() in newer versions)"
        )
    planned = [name for name, module in regions.items() if is_planned(module)]
    if planned:
        raise ApplyError(f"{planned[0]} is under a plan already; remove that one first")


def region_kind(module: nn.Module) -> str:
    """A name that is equal for regions of equal class and parameter shapes, of which the same are trained."""
    shapes = [
        f"{name}{tuple(each.shape)}{each.dtype}{'' if each.requires_grad else ' frozen'}"
        for name, each in module.named_parameters()
    ]
    classes = [type(each).__qualname__ for each in module.modules()]
    digest = hashlib.sha256("\n".join([*shapes, *classes]).encode()).hexdigest()[:12]
    return f"{type(module).__name__}-{digest}"


def fingerprint(model: nn.Module, regions: dict[str, nn.Module]) -> Fingerprint:
    """What a plan for this model must have been made for."""
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()})
    kinds = tuple(map(region_kind, regions.values()))
    return Fingerprint(type(model).__name__, kinds, tuple(dtypes), layout=spread_over(model.parameters()))


def _check_plan(plan: Plan, model: Fingerprint, layers: Sequence[int] | None) -> None:
    """`layers`: numbers of the model's regions in the whole that the plan is for, where the model is a part of it."""
    made_for = plan.fingerprint
    if made_for is not None and layers is not None:
        missing = [layer for layer in layers if layer >= len(made_for.regions)]
        if missing:
            raise PlanError(f"the plan {plan.name} has {len(made_for.regions)} layers, and layer {missing[0]} is here")
        made_for = replace(made_for, model=model.model, regions=tuple(made_for.regions[layer] for layer in layers))
    if made_for is not None:
        # Inputs and autocast are known, and checked, when a region is called.
        differences = made_for.differences(replace(model, inputs=made_for.inputs, autocast=made_for.autocast))
        if differences:
            raise PlanError("\n  ".join([f"the plan {plan.name} was made for another model:", *differences]))
    if layers is not None:
        return
    count = len(model.regions)
    beyond = [layer for rule in plan.rules for layer in rule.layers or () if layer >= count]
    if beyond:
        raise PlanError(f"the plan {plan.name} speaks of layer {max(beyond)}; the model has layers 0-{count - 1}")
